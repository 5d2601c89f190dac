"""Triton kernel that rotates concatenated keys on a GPU in one pass over memory.

PyTorch's operations would read and write the keys in float32 about ten times.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16
"""Number of keys of a head that each program rotates."""


def rotate_fused(
    out: Tensor, states: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool
) -> None:
    """``rope.rotate_into`` as a single GPU kernel.

    ``out`` must be the first tokens of a contiguous tensor. ``cos`` and ``sin`` must be float32.
    ``interleaved``: Whether dimension ``2i`` pairs with ``2i + 1``.
    """
    heads, tokens, size = states.shape
    _rotate_rows[(triton.cdiv(tokens, _ROWS), heads)](
        states.contiguous(), cos.contiguous(), sin.contiguous(), out, tokens, out.stride(0) // size,
        size, cos.shape[-1], interleaved, _ROWS, triton.next_power_of_2(size),
    )  # fmt: skip


# Compiled once for all lengths. Without annotations, because Triton only accepts its own types.
@triton.jit(do_not_specialize=["tokens", "out_tokens"])  # type: ignore[untyped-decorator]
def _rotate_rows(  # type: ignore[no-untyped-def]
    states, cos, sin, out, tokens, out_tokens,
    size: tl.constexpr, rotary: tl.constexpr, interleaved: tl.constexpr,
    rows: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    token = (tl.program_id(0) * rows + tl.arange(0, rows)[:, None]).to(tl.int64)
    column = tl.arange(0, columns)[None, :]
    partner = column ^ 1 if interleaved else (column + rotary // 2) % rotary
    inside = (token < tokens) & (column < size)
    turns = (token < tokens) & (column < rotary)
    row = states + (head * tokens + token) * size
    state = tl.load(row + column, inside, 0.0).to(tl.float32)
    other = tl.load(row + partner, turns, 0.0).to(tl.float32)
    angle = token * rotary + column
    state = state * tl.load(cos + angle, turns, 1.0) + other * tl.load(sin + angle, turns, 0.0)
    target = out + (head * out_tokens + token) * size + column
    tl.store(target, state.to(out.dtype.element_ty), inside)
