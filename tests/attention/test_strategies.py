"""Which kernel is taken for which tensors."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.attention.kernels import attend_fused, attend_plain
from blockattn_rag.attention.strategies import kernel_for

SIZE = 16
pytestmark = pytest.mark.usefixtures("no_gradients")


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(1, dtype=dtype).expand(*shape)  # no memory, whatever the shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_kernel_serves_every_type_that_it_supports(dtype: torch.dtype) -> None:
    query, key = states(1, 3, 150, SIZE, dtype=dtype), states(1, 3, 512, SIZE, dtype=dtype)
    assert kernel_for(query, key, key) is attend_fused
    assert kernel_for(query, key, key, torch.empty(1)) is attend_fused


def test_what_fused_kernels_cannot_take_goes_by_the_plain_one() -> None:
    query, key = states(1, 2, 20, SIZE), states(1, 2, 600, SIZE)
    assert kernel_for(query, key, states(1, 2, 600, 8)) is attend_plain
    assert kernel_for(query, key[:, :, :0], key[:, :, :0]) is attend_plain
    assert kernel_for(query.double(), key.double(), key.double()) is attend_plain
    with torch.enable_grad():
        assert kernel_for(query, key, key) is attend_plain
    elsewhere = [t.to("meta") for t in (query, key)]
    assert kernel_for(elsewhere[0], elsewhere[1], elsewhere[1]) is attend_plain
