"""The Triton kernel that rotates keys, compared with PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockattn_rag.kv.rope import RotaryLayout, rotate
from blockattn_rag.kv.rotation import rotate_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (80, 80), (96, 48), (128, 128)])
def test_rotations_equal_pytorch_and_do_not_write_to_the_free_space(
    dtype: torch.dtype, pairing: Any, size: int, rotary: int
) -> None:
    tokens, room = 37, 13
    layout = RotaryLayout(10_000.0 ** (-torch.arange(0, rotary, 2) / rotary), pairing)
    keys = torch.randn(2, tokens, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = layout.cos_sin(torch.arange(tokens) * 7, keys.device)
    out = torch.full((2, tokens + room, size), 7.0, dtype=dtype)
    rotate_fused(out[:, :tokens], keys, cos, sin, interleaved=pairing == "interleaved")
    expected = rotate(keys, cos, sin, layout)
    # One unit in the last place, because the interpreter truncates to bfloat16 and GPUs round.
    torch.testing.assert_close(out[:, :tokens], expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert (out[:, tokens:] == 7).all()


def test_rounds_to_the_dtype_of_the_result() -> None:
    layout = RotaryLayout(torch.ones(8), "half")
    keys = torch.randn(1, 5, 16)
    cos, sin = layout.cos_sin(torch.arange(5), keys.device)
    out = torch.empty(1, 5, 16, dtype=torch.float16)
    rotate_fused(out, keys, cos, sin, interleaved=False)
    expected = rotate(keys, cos, sin, layout).half()
    torch.testing.assert_close(out, expected, rtol=torch.finfo(torch.float16).eps, atol=1e-6)
