"""Segments: the distinct blocks in a batch of contexts. A segment may join several small blocks.

A *pair* is one occurrence of a segment in a request. A request may contain a segment twice.

Shapes: ``R`` requests, ``K`` key-value heads, ``Q`` query rows, ``N`` key tokens, ``D`` head size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from blockattn_rag.attention.latent import latent_states
from blockattn_rag.attention.merge import Partial
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, PlacedBlock, joined_states
from blockattn_rag.kv.rope import Angles, RotaryLayout, rotate


class View(NamedTuple):
    """Part of a segment that is visible to queries: the keys from index ``first`` on, limited by
    ``mask``, bool ``[1, 1, query rows of all pairs, keys from first]``. None: no further limit."""

    first: int = 0
    mask: Tensor | None = None


class Reader(NamedTuple):
    """Index of a request that reads a segment, and the segment's shift and start in the prompt (see
    ``PlacedBlock``)."""

    request: int
    shift: int
    start: int

    def moved(self, shift: int, start: int) -> Reader:
        return Reader(self.request, self.shift + shift, self.start + start)


@dataclass(frozen=True, slots=True)
class Segment(Context):
    """One or more blocks that occur in the same requests at the same relative positions.

    A single block is read in place. If it is quantized, every read dequantizes it. Several blocks,
    and rotary keys with latents, are joined on a layer's first read, and then kept.
    Blocks are ordered by start. Shifts and starts are relative to the segment's first block.
    """

    readers: Sequence[Reader]
    _angles: Angles = field(default_factory=dict)
    _joined: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def is_dequantized(self) -> bool:
        """Whether each call to ``states`` dequantizes into new tensors."""
        return len(self.blocks) == 1 and self.blocks[0].kv.scales is not None

    def states(
        self, layer: int, layout: RotaryLayout, *, are_latents: bool
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, N, D]``, with keys at positions relative to the segment."""
        if len(self.blocks) == 1 and not are_latents:
            return self.blocks[0].kv.states(layer)
        if layer not in self._joined:
            joined = joined_states(self.blocks, layer, layout, self._angles)
            self._joined[layer] = latent_states(*joined) if are_latents else joined
        return self._joined[layer]


def segments_of(contexts: Sequence[Context], tokens: int) -> list[Segment]:
    """Create segments for all distinct blocks. Joins blocks of fewer than ``tokens`` tokens."""
    # Keyed by digest, because two requests may have loaded the same block from a store separately.
    # The flag distinguishes quantized from unquantized copies.
    readers: dict[tuple[str, bool], tuple[BlockKV, list[Reader]]] = {}
    for request, context in enumerate(contexts):
        for kv, start, shift in context.blocks:
            same = kv.digest, kv.scales is None
            readers.setdefault(same, (kv, []))[1].append(Reader(request, shift, start))
    segments: list[Segment] = []
    # Small blocks, grouped by their readers, relative to the first reader's shift and start. Other
    # blocks may lie between them, because attention only depends on the keys' positions.
    small: dict[tuple[Reader, ...], list[PlacedBlock]] = {}
    for kv, pairs in readers.values():
        if kv.num_tokens >= tokens:
            segments.append(Segment((PlacedBlock(kv, 0, 0),), pairs))
            continue
        _, shift, start = pairs[0]
        relative = tuple(pair.moved(-shift, -start) for pair in pairs)
        small.setdefault(relative, []).append(PlacedBlock(kv, start, shift))
    for relative, blocks in small.items():
        for run in _runs(blocks, tokens):
            _, start, shift = run[0]
            moved = tuple(PlacedBlock(b.kv, b.start - start, b.shift - shift) for b in run)
            segments.append(Segment(moved, [pair.moved(shift, start) for pair in relative]))
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


def _within(context: Context, window: int) -> Context:
    """Blocks of a context that are at least partly visible to the next token."""
    first = context.num_tokens + 1 - window
    return Context(tuple(b for b in context.blocks if b.start + b.kv.num_tokens > first))


class _Window:
    """Visible part of a segment in a layer with a sliding window of ``window`` tokens, for requests
    with ``lengths`` context tokens."""

    def __init__(self, segment: Segment, lengths: Sequence[int], window: int) -> None:
        blocks = segment.blocks
        self._places = torch.cat([b.start + torch.arange(b.kv.num_tokens) for b in blocks])
        self._first = blocks[0].start
        # Lowest position in the segment, for each pair, that the context's next token attends to.
        self._lowest = [lengths[r] + 1 - window - start for r, _, start in segment.readers]

    def view(self, before: int, tokens: int, groups: int, device: torch.device) -> View:
        """See ``SegmentTable.views``."""
        highest = max(self._lowest) + before + tokens - 1  # Lowest key visible to the last query.
        if highest <= self._first:
            return View()
        first = int(torch.searchsorted(self._places, min(self._lowest) + before))
        places = self._places[first:]
        if not len(places) or highest <= places[0]:
            return View(first)
        lowest = torch.tensor(self._lowest) + before
        seen = places >= (lowest[:, None] + torch.arange(tokens))[..., None]
        rows = seen[:, None].expand(-1, groups, -1, -1).reshape(1, 1, -1, len(places))
        return View(first, rows.to(device))


class SegmentTable:
    """Segments and their pairs, as tables shared by all layers with the same window.

    Args:
        contexts: Blocks of each request, with their positions. A context may be empty.
        tokens: Blocks with fewer tokens are joined.
        window: Sliding window: a token attends to the last ``window`` tokens, including itself.
            Blocks that no new token attends to are omitted. None: all tokens are visible.
    """

    def __init__(
        self,
        contexts: Sequence[Context],
        layouts: Sequence[RotaryLayout],
        device: torch.device,
        tokens: int,
        window: int | None = None,
    ) -> None:
        read = contexts if window is None else [_within(context, window) for context in contexts]
        self.segments = segments_of(read, tokens)
        self.num_requests = len(contexts)
        self._layouts = layouts
        self._device = device
        readers = [reader for segment in self.segments for reader in segment.readers]
        requests = [reader.request for reader in readers]
        shifts = [reader.shift for reader in readers]
        self._windows: list[_Window] | None = None
        if window is not None:
            lengths = [context.num_tokens for context in contexts]
            self._windows = [_Window(segment, lengths, window) for segment in self.segments]
        self._views: tuple[object, list[View]] = None, []
        self.is_dequantized = any(segment.is_dequantized for segment in self.segments)
        # With one request and no repeated block, partial results are already in order.
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

    def states(
        self, layer: int, views: Sequence[View], *, are_latents: bool
    ) -> Iterator[tuple[Tensor, Tensor] | None]:
        """Iterate over the keys and values ``[K, N, D]`` of each segment, from the first visible
        key. Yields None for segments without a visible key if ``is_one_each``.

        Segments of one quantized block are dequantized one at a time, to save memory.
        ``are_latents``: Whether the layer has rotary keys and latents; see ``latent_states``.
        """
        for segment, (first, _) in zip(self.segments, views, strict=True):
            if self.is_one_each and first >= segment.num_tokens:
                yield None
            else:
                layout = self._layouts[layer]
                key, value = segment.states(layer, layout, are_latents=are_latents)
                yield key[:, first:], value[:, first:]

    def rotated(self, layer: int, query: Tensor) -> Tensor:
        """Rotate the requests' queries ``[R, K, Q, D]`` to match each pair's segment. Returns
        ``[pairs, K, Q, D]``."""
        layout, pairs = self._layouts[layer], len(self._request_of)
        chosen = query[self._request_of] if self.num_requests > 1 else query
        if layout in self._angles:
            return rotate(chosen, *self._angles[layout], layout)
        return chosen.expand(pairs, *query.shape[1:])

    def views(self, before: int, tokens: int, groups: int) -> list[View]:
        """Compute the visible part of each segment.

        Args:
            before: Number of tail tokens before the queries. The tails have no padding.
            tokens: Number of query tokens.
            groups: Number of query rows per token and pair.
        """
        if self._windows is None:
            return [View()] * len(self.segments)
        asked = before, tokens, groups
        if self._views[0] != asked:  # Otherwise, reuse the previous layer's views.
            self._views = asked, [window.view(*asked, self._device) for window in self._windows]
        return self._views[1]

    def by_request(self, parts: Sequence[Partial]) -> list[Partial]:
        """Regroup partial results from one row per pair to one row per request, ``[R, ...]``."""
        if self.is_one_each or not parts:
            return list(parts)
        found = Partial(*map(torch.cat, zip(*parts, strict=True)))
        shape = (self._num_slots, self.num_requests, *found.lse.shape[1:])
        outputs = found.output.new_zeros(*shape, found.output.shape[-1])
        lses = found.lse.new_full(shape, -math.inf)
        at = self._slot_of, self._request_of
        outputs[at], lses[at] = found
        return [Partial(*part) for part in zip(outputs, lses, strict=True)]
