"""Segments: the distinct blocks of a batch of contexts. Small blocks are joined into one segment.

A *pair* is one occurrence of a segment in a request. A request may contain a block twice.

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

from blockattn_rag.attention.merge import Partial
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock, joined_states
from blockattn_rag.kv.rope import Angles, RotaryLayout, rotate


@dataclass(frozen=True, slots=True)
class Segment(Context):
    """Blocks that occur in the same requests at the same distances from each other.

    A single block is read in place; if it is quantised, it is dequantised on every read. Several
    blocks are joined into one tensor per layer, on the layer's first read.

    Args:
        blocks: Blocks, with their shifts relative to the segment.
        readers: Request index and shift of each pair.
    """

    readers: Sequence[tuple[int, int]]
    _angles: Angles = field(default_factory=dict)
    _joined: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def is_dequantised(self) -> bool:
        """Whether every call of ``states`` dequantises into new tensors."""
        return len(self.blocks) == 1 and self.blocks[0].kv.scales is not None

    def states(self, layer: int, layout: RotaryLayout) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, N, D]``, with keys at positions relative to the segment."""
        if len(self.blocks) == 1:
            return self.blocks[0].kv.states(layer)
        if layer not in self._joined:
            self._joined[layer] = joined_states(self.blocks, layer, layout, self._angles)
        return self._joined[layer]


def segments_of(contexts: Sequence[Context], tokens: int) -> list[Segment]:
    """Segments of all distinct blocks. Blocks with fewer than ``tokens`` tokens are joined."""
    # Keyed by digest, because two requests may each have loaded the same block from disk. The flag
    # separates a quantised copy from an unquantised one.
    readers: dict[tuple[str, bool], tuple[BlockKV, list[tuple[int, int]]]] = {}
    for request, context in enumerate(contexts):
        for kv, _, shift in context.blocks:
            same = kv.digest, kv.scales is None
            readers.setdefault(same, (kv, []))[1].append((request, shift))
    segments: list[Segment] = []
    # Small blocks, grouped by the requests of their readers and by shifts relative to the first
    # reader. They may be joined in any order: attention depends on the keys' positions alone.
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
    """Group blocks into runs of at least ``tokens`` tokens; the last run may be shorter."""
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
    """Segments and their pairs, as tables that all layers share.

    Args:
        contexts: Placed blocks of each request. A context may be empty.
        tokens: Blocks with fewer tokens are joined.
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
        # With one request and no repeated block, partial results need no sorting.
        self.is_one_each = self.num_requests == 1 and len(requests) == len(self.segments)
        # A segment's keys start at position 0 instead of `shift`. Moving the queries back by
        # `shift` positions preserves the distances.
        self._angles: Angles = {}
        for layout in set(layouts):
            if layout.rotates and any(shifts):
                cos, sin = layout.cos_sin(-torch.tensor(shifts), device)
                self._angles[layout] = cos[:, None, None], sin[:, None, None]
        # A pair's slot is the number of earlier pairs of the same request.
        used: defaultdict[int, Iterator[int]] = defaultdict(count)
        slots = [next(used[request]) for request in requests]
        self._num_slots = max(slots, default=-1) + 1
        self._request_of = torch.tensor(requests, dtype=torch.long, device=device)
        self._slot_of = torch.tensor(slots, dtype=torch.long, device=device)

    def states(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Keys and values ``[K, N, D]`` of each segment. An iterator, so that dequantised blocks
        are never all in memory at once."""
        return (segment.states(layer, self._layouts[layer]) for segment in self.segments)

    def rotated(self, layer: int, query: Tensor) -> Tensor:
        """Queries ``[pairs, K, Q, D]``, rotated for each pair's segment, from the queries
        ``[R, K, Q, D]`` of the requests."""
        layout, pairs = self._layouts[layer], len(self._request_of)
        chosen = query[self._request_of] if self.num_requests > 1 else query
        if layout in self._angles:
            return rotate(chosen, *self._angles[layout], layout)
        return chosen.expand(pairs, *query.shape[1:])

    def by_request(self, parts: Sequence[Partial]) -> list[Partial]:
        """Regroup partial results of segments, one row per pair, to results ``[R, ...]``."""
        if self.is_one_each or not parts:
            return list(parts)
        found = Partial(*map(torch.cat, zip(*parts, strict=True)))
        shape = (self._num_slots, self.num_requests, *found.lse.shape[1:])
        outputs = found.output.new_zeros(*shape, found.output.shape[-1])
        lses = found.lse.new_full(shape, -math.inf)
        at = self._slot_of, self._request_of
        outputs[at], lses[at] = found
        return [Partial(*part) for part in zip(outputs, lses, strict=True)]
