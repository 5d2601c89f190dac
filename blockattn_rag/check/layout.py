"""Where the tokens of a prompt stand, for the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """Where the tokens of a prompt stand, one entry a token.

    ``block``: the block that a token belongs to, or whose sink it belongs to; ``position``: in the
    prompt, where a sink takes none and stands right before its block.
    """

    block: Tensor
    position: Tensor
    is_sink: Tensor


def layout_of(block_lengths: Sequence[int], sink_length: int = 0) -> Layout:
    """The layout of a prompt with a sink before each block but the first and the final one."""
    block: list[int] = []
    position: list[int] = []
    is_sink: list[bool] = []
    start, final = 0, len(block_lengths) - 1
    for number, length in enumerate(block_lengths):
        sink = sink_length if 0 < number < final else 0
        block += [number] * (sink + length)
        position += range(start - sink, start + length)
        is_sink += [True] * sink + [False] * length
        start += length
    return Layout(torch.tensor(block), torch.tensor(position), torch.tensor(is_sink))
