"""Segments: the distinct blocks of a batch of contexts, small ones joined, with their readers.

A *pair* is a segment and one place of it in a request. A request may hold a block twice.

Shapes: ``R`` requests, ``K`` key-value heads, ``Q`` query rows, ``N`` key tokens, ``D`` head size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import Partial
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock, joined_states
from blockattn_rag.kv.rope import Angles, RotaryLayout, rotate


@dataclass(frozen=True, slots=True)
class Segment(Context):
    """Blocks that the same requests hold at the same distances from each other.

    Args:
        blocks: with shifts relative to the segment. One block is read where it lies, and
            dequantised each time if it is quantised; several are joined into one tensor per layer
            when a layer first asks for it.
        readers: request and shift of the segment, for each pair.
    """

    readers: Sequence[tuple[int, int]]
    _angles: Angles = field(default_factory=dict)
    _joined: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def is_dequantised(self) -> bool:
        """Whether ``states`` makes new tensors each time."""
        return len(self.blocks) == 1 and self.blocks[0].kv.scales is not None

    def states(self, layer: int, layout: RotaryLayout) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, N, D]``; keys stand where the readers' shifts expect them."""
        if len(self.blocks) == 1:
            return self.blocks[0].kv.states(layer)
        if layer not in self._joined:
            self._joined[layer] = joined_states(self.blocks, layer, layout, self._angles)
        return self._joined[layer]


def segments_of(contexts: Sequence[Context], tokens: int) -> list[Segment]:
    """Every distinct block once; those under ``tokens`` tokens joined into segments of as many."""
    # By digest: two requests may have read the same block from disk, each for itself, and perhaps
    # one of them a quantised one.
    readers: dict[tuple[str, bool], tuple[BlockKV, list[tuple[int, int]]]] = {}
    for request, context in enumerate(contexts):
        for kv, _, shift in context.blocks:
            same = kv.digest, kv.scales is None
            readers.setdefault(same, (kv, []))[1].append((request, shift))
    segments: list[Segment] = []
    # Small blocks, by their readers' requests and by the shifts relative to the first reader's.
    # Blocks may be joined in any order: attention depends on where keys stand, not on their order.
    small: dict[tuple[tuple[int, int], ...], list[PlacedBlock]] = {}
    for kv, pairs in readers.values():
        if kv.num_tokens >= tokens:
            segments.append(Segment((PlacedBlock(kv, 0, 0),), pairs))
            continue
        first = pairs[0][1]
        relative = tuple((request, shift - first) for request, shift in pairs)
        small.setdefault(relative, []).append(PlacedBlock(kv, 0, first))
    for relative, blocks in small.items():
        for run in _runs(blocks, tokens):
            at = run[0].shift
            moved = tuple(PlacedBlock(kv, 0, shift - at) for kv, _, shift in run)
            segments.append(Segment(moved, [(request, shift + at) for request, shift in relative]))
    return segments


def _runs(blocks: Sequence[PlacedBlock], tokens: int) -> list[list[PlacedBlock]]:
    """Cut into runs that reach ``tokens`` tokens, the last one perhaps not."""
    runs: list[list[PlacedBlock]] = []
    filled = tokens
    for block in blocks:
        if filled >= tokens:
            runs.append([])
            filled = 0
        runs[-1].append(block)
        filled += block.kv.num_tokens
    return runs


class SegmentTable:
    """Segments and their pairs, as tables that every layer uses.

    Args:
        contexts: the placed blocks of each request, those without blocks included.
        layouts: rotary layout per layer.
        device: where queries are.
        tokens: blocks under so many tokens are joined.
    """

    def __init__(
        self,
        contexts: Sequence[Context],
        layouts: Sequence[RotaryLayout],
        device: torch.device,
        tokens: int,
    ) -> None:
        self.segments = segments_of(contexts, tokens)
        self.num_requests = len(contexts)
        self._layouts = layouts
        requests = [request for segment in self.segments for request, _ in segment.readers]
        shifts = [shift for segment in self.segments for _, shift in segment.readers]
        self.is_dequantised = any(segment.is_dequantised for segment in self.segments)
        # One request, no block twice: partial results need no sorting.
        self.is_one_each = self.num_requests == 1 and len(requests) == len(self.segments)
        # Queries are rotated for their own positions. A block was moved by `shift`, so to the
        # block's keys the queries stand `shift` earlier.
        self._angles: Angles = {}
        for layout in set(layouts):
            if layout.rotates and shifts:
                cos, sin = layout.cos_sin(-torch.tensor(shifts), device)
                self._angles[layout] = cos[:, None, None], sin[:, None, None]
        # A pair's slot: how many pairs of the same request stand before it.
        used: defaultdict[int, Iterator[int]] = defaultdict(count)
        slots = [next(used[request]) for request in requests]
        self._num_slots = max(slots, default=-1) + 1
        self._request_of = torch.tensor(requests, dtype=torch.long, device=device)
        self._slot_of = torch.tensor(slots, dtype=torch.long, device=device)

    def states(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values ``[K, N, D]`` of one segment after the other, because those of quantised
        blocks need not all be in memory at once."""
        return (segment.states(layer, self._layouts[layer]) for segment in self.segments)

    def rotated(self, layer: int, query: Tensor) -> Tensor:
        """Each pair's queries ``[pairs, K, Q, D]`` as its segment sees them, from the requests'
        queries ``[R, K, Q, D]``."""
        layout, pairs = self._layouts[layer], len(self._request_of)
        chosen = query[self._request_of] if self.num_requests > 1 else query
        if layout in self._angles:
            return rotate(chosen, *self._angles[layout], layout)
        return chosen.expand(pairs, *query.shape[1:])

    def by_request(self, parts: Sequence[Partial]) -> list[Partial]:
        """Partials ``[R, ...]`` that cover all segments, from those of each segment's pairs."""
        if self.is_one_each or not parts:
            return list(parts)
        found = Partial(*map(torch.cat, zip(*parts, strict=True)))
        shape = (self._num_slots, self.num_requests, *found.lse.shape[1:])
        outputs = found.output.new_zeros(*shape, found.output.shape[-1])
        lses = found.lse.new_full(shape, -math.inf)
        at = self._slot_of, self._request_of
        outputs[at], lses[at] = found
        return [Partial(*part) for part in zip(outputs, lses, strict=True)]
