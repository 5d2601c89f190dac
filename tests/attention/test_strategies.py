"""Which kernel is taken for which tensors."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.attention.kernels import Kernel, attend_fused, attend_matmul, attend_plain
from blockattn_rag.attention.strategies import kernel_for

SIZE = 16
pytestmark = pytest.mark.usefixtures("no_gradients")


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(1, dtype=dtype).expand(*shape)  # no memory, whatever the shape


@pytest.mark.parametrize(
    ("shape", "keys", "kernel"),
    [
        ((1, 3, 150), 512, attend_matmul),
        ((1, 3, 16), 8192, attend_matmul),
        ((1, 3, 15), 512, attend_fused),
        ((1, 3, 192), 512, attend_fused),
        ((1, 3, 150), 511, attend_fused),
        ((16, 8, 150), 1024, attend_fused),  # scores of 79 MB
    ],
)
def test_matrix_products_are_taken_for_questions_over_long_blocks_that_fit(
    shape: tuple[int, int, int], keys: int, kernel: Kernel
) -> None:
    query, key = states(*shape, SIZE), states(*shape[:2], keys, SIZE)
    assert kernel_for(query, key, key) is kernel
    assert kernel_for(query, key, key, torch.empty(1)) is attend_fused
    half_query, half_key = (states(*t.shape, dtype=torch.float16) for t in (query, key))
    assert kernel_for(half_query, half_key, half_key) is attend_fused


def test_what_fused_kernels_cannot_take_goes_by_the_plain_one() -> None:
    query, key = states(1, 2, 20, SIZE), states(1, 2, 600, SIZE)
    assert kernel_for(query, key, states(1, 2, 600, 8)) is attend_plain
    assert kernel_for(query, key[:, :, :0], key[:, :, :0]) is attend_plain
    assert kernel_for(query.double(), key.double(), key.double()) is attend_plain
    with torch.enable_grad():
        assert kernel_for(query, key, key) is attend_plain
    elsewhere = [t.to("meta") for t in (query, key)]
    assert kernel_for(elsewhere[0], elsewhere[1], elsewhere[1]) is attend_plain
