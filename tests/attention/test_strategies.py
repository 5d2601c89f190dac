"""Which kernel is taken for which tensors."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.attention.strategies import kernel_for

SIZE = 16


def states(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(1, dtype=dtype).expand(*shape)  # no memory, whatever the shape


@pytest.mark.parametrize(
    ("shape", "keys", "name"),
    [
        ((1, 3, 150), 512, "matrix products"),
        ((1, 3, 16), 8192, "matrix products"),
        ((1, 3, 15), 512, "fused"),
        ((1, 3, 192), 512, "fused"),
        ((1, 3, 150), 511, "fused"),
        ((16, 8, 150), 1024, "fused"),  # scores of 79 MB
    ],
)
def test_matrix_products_are_taken_for_questions_over_long_blocks_that_fit(
    shape: tuple[int, int, int], keys: int, name: str
) -> None:
    query, key = states(*shape, SIZE), states(*shape[:2], keys, SIZE)
    assert kernel_for(query, key, key).name == name
    assert kernel_for(query, key, key, torch.empty(1)).name == "fused"
    half_query, half_key = (states(*t.shape, dtype=torch.float16) for t in (query, key))
    assert kernel_for(half_query, half_key, half_key).name == "fused"


def test_what_fused_kernels_cannot_take_goes_by_the_plain_one() -> None:
    query, key = states(1, 2, 20, SIZE), states(1, 2, 600, SIZE)
    assert kernel_for(query, key, states(1, 2, 600, 8)).name == "plain"
    assert kernel_for(query, key[:, :, :0], key[:, :, :0]).name == "plain"
    assert kernel_for(query.double(), key.double(), key.double()).name == "plain"
    elsewhere = [t.to("meta") for t in (query, key)]
    assert kernel_for(elsewhere[0], elsewhere[1], elsewhere[1]).name == "plain"
