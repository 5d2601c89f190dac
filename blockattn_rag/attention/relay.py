"""Relay attention: blocks are attended to where they lie, and read once for all who want them.

A score depends only on the distance of query and key. So instead of rotating a block's keys by the
block's offset, the few queries are rotated the other way, once per block, and attend to the stored
keys as they are. The partial results are merged by their log-sum-exp, or, for one request on the
CPU, summed up block by block. No key is copied, rotated or rounded again, but for small blocks,
which are joined (:data:`DECODE_TOKENS`).

Shapes: ``B`` requests, ``H`` query heads, ``K`` key-value heads, ``G = H / K``, ``Q`` query tokens,
``N`` key tokens, ``D`` head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from blockattn_rag.attention.kernels import Partial, attend, attend_jointly, attend_onward, merge
from blockattn_rag.kv.block_kv import PlacedBlock, joined_states
from blockattn_rag.kv.rope import RotaryLayout, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from blockattn_rag.kv.block_kv import BlockKV, Context

#: Blocks of fewer tokens are joined, for a prompt and for the tokens of an answer. One more block
#: costs some 30 to 40 microseconds a layer in calls, whatever its size, and on an accelerator
#: hardly more than that. A prompt is read in one pass, so on the CPU blocks are worth joining only
#: if they are tiny; an answer is many passes. Joined blocks are copies, which live as long as the
#: answer takes.
PREFILL_TOKENS, DECODE_TOKENS = 32, 512
ACCELERATOR_TOKENS = 8192  # reasoned from launch costs, not measured yet

#: Above so many rows, the kernel is as fast by itself; scores are kept to 64 MiB.
MOST_ROWS, MOST_SCORES = 384, 1 << 24


class _Segment:
    """Blocks that the same requests read at the same distances from each other.

    Args:
        blocks: with shifts relative to the segment. One block is read where it lies; several are
            joined into one tensor per layer when a layer first asks for it.
        readers: request and shift of the segment, for each who reads it.
    """

    def __init__(self, blocks: Sequence[PlacedBlock], readers: Sequence[tuple[int, int]]) -> None:
        self.blocks = tuple(blocks)
        self.readers = tuple(readers)
        self._tables: dict[RotaryLayout, tuple[Tensor, Tensor]] = {}
        self._joined: dict[int, tuple[Tensor, Tensor]] = {}

    def states(self, layer: int, layout: RotaryLayout) -> tuple[Tensor, Tensor]:
        """Keys and values ``[K, N, D]``, keys standing as the readers' shifts expect."""
        if len(self.blocks) == 1:
            return self.blocks[0].kv.states(layer)
        if layer not in self._joined:
            self._joined[layer] = joined_states(self.blocks, layer, layout, self._tables)
        return self._joined[layer]


def _segments(contexts: Sequence[Context], tokens: int) -> list[_Segment]:
    """Every distinct block once; those under ``tokens`` tokens joined into segments of as many."""
    # By digest: two requests may have read the same block from disk, each for itself.
    readers: dict[str, tuple[BlockKV, list[tuple[int, int]]]] = {}
    for request, context in enumerate(contexts):
        for kv, _, shift in context.blocks:
            readers.setdefault(kv.digest, (kv, []))[1].append((request, shift))
    segments: list[_Segment] = []
    # Blocks may be joined in any order: attention asks where keys stand, not which come first.
    small: dict[tuple[tuple[int, int], ...], list[PlacedBlock]] = {}
    for kv, pairs in readers.values():
        if kv.num_tokens >= tokens:
            segments.append(_Segment([PlacedBlock(kv, 0, 0)], pairs))
            continue
        first = pairs[0][1]
        company = tuple((request, shift - first) for request, shift in pairs)
        small.setdefault(company, []).append(PlacedBlock(kv, 0, first))
    for company, blocks in small.items():
        for run in _runs(blocks, tokens):
            at = run[0].shift
            moved = [PlacedBlock(kv, 0, shift - at) for kv, _, shift in run]
            segments.append(_Segment(moved, [(request, shift + at) for request, shift in company]))
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


class _Reading:
    """Segments and their readers, as tables that every layer uses. A *pair* is a reader of one."""

    def __init__(
        self,
        segments: Sequence[_Segment],
        layouts: Sequence[RotaryLayout],
        num_requests: int,
        device: torch.device,
    ) -> None:
        self._segments = segments
        self._layouts = layouts
        self._num_requests = num_requests
        # One request, no block twice: partial results need no sorting.
        self.is_one_each = num_requests == 1 and all(len(s.readers) == 1 for s in segments)
        requests = [request for segment in segments for request, _ in segment.readers]
        shifts = [shift for segment in segments for _, shift in segment.readers]
        # Queries stand at their own positions; seen from a block that was moved by `shift`, they
        # stand `shift` earlier.
        self._tables: dict[RotaryLayout, tuple[Tensor, Tensor]] = {}
        for layout in set(layouts):
            if layout.rotates and shifts:
                cos, sin = layout.cos_sin(-torch.tensor(shifts), device)
                self._tables[layout] = cos[:, None, None], sin[:, None, None]
        slots = _slots(requests)
        self._num_slots = max(slots, default=-1) + 1
        self._request_of = torch.tensor(requests, dtype=torch.long, device=device)
        self._slot_of = torch.tensor(slots, dtype=torch.long, device=device)

    def attend(self, layer: int, query: Tensor, groups: int, scale: float) -> list[Partial]:
        """Partials ``[R, K, G * Q, D]`` over all segments, for queries ``[R, H, Q, D]``."""
        turned = _fold(self._turned(layer, query), groups)
        parts, start = [], 0
        for segment in self._segments:
            key, value = segment.states(layer, self._layouts[layer])
            pairs = slice(start, start + len(segment.readers))
            parts.append(_attend_shared(turned[pairs], key, value, scale))
            start = pairs.stop
        return parts if self.is_one_each else self._by_request(parts)

    def attend_token(
        self, layer: int, query: Tensor, tail_key: Tensor, tail_value: Tensor, scale: float
    ) -> Tensor:
        """Attention ``[1, K, G, D]`` over all segments and the tail, for one token's query
        ``[1, H, 1, D]`` of one request that reads every segment once."""
        groups = query.shape[1] // tail_key.shape[1]
        queries = [*_fold(self._turned(layer, query), groups), _fold(query, groups)[0]]
        keys, values = self._states(layer)
        keys, values = [*keys, tail_key[0]], [*values, tail_value[0]]
        return attend_jointly(queries, keys, values, scale)[None]

    def attend_onward(
        self, layer: int, query: Tensor, tail: Partial, scale: float
    ) -> Tensor | None:
        """Attention ``[1, K, G * Q, D]`` over all segments and the tail, for queries
        ``[1, H, Q, D]`` of one request that reads every segment once; None where that would take
        too much memory or time."""
        heads, rows = tail.lse.shape[1:]
        keys, values = self._states(layer)
        longest = max((key.shape[1] for key in keys), default=0)
        if rows > MOST_ROWS or not 0 < heads * rows * longest <= MOST_SCORES:
            return None
        queries = _fold(self._turned(layer, query * scale), query.shape[1] // heads)
        part = Partial(tail.output[0], tail.lse[0])
        return attend_onward(part, queries, keys, values)[None]

    def _states(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of every segment."""
        states = [segment.states(layer, self._layouts[layer]) for segment in self._segments]
        return [key for key, _ in states], [value for _, value in states]

    def _by_request(self, parts: Sequence[Partial]) -> list[Partial]:
        """One partial per slot, each over all requests, from one per segment."""
        if not parts:
            return []
        found, at = (
            Partial(*map(torch.cat, zip(*parts, strict=True))),
            (
                self._slot_of,
                self._request_of,
            ),
        )
        shape = (self._num_slots, self._num_requests, *found.lse.shape[1:])
        outputs = found.output.new_zeros(*shape, found.output.shape[-1])
        lses = found.lse.new_full(shape, -math.inf)
        outputs[at], lses[at] = found.output, found.lse
        return [Partial(*part) for part in zip(outputs, lses, strict=True)]

    def _turned(self, layer: int, query: Tensor) -> Tensor:
        """Each pair's queries ``[pairs, H, Q, D]`` as its segment sees them."""
        layout, pairs = self._layouts[layer], len(self._request_of)
        chosen = query[self._request_of] if self._num_requests > 1 else query
        if layout in self._tables:
            return rotate(chosen, *self._tables[layout], layout)
        return chosen.expand(pairs, *query.shape[1:])


def _tokens_to_join(device: torch.device) -> tuple[int, int]:
    """Below how many tokens blocks are joined, for a prompt and for an answer."""
    if device.type == "cpu":
        return PREFILL_TOKENS, DECODE_TOKENS
    return ACCELERATOR_TOKENS, ACCELERATOR_TOKENS


class RelayPlan:
    """Who attends to which block, for one batch of requests. Made once, used by every layer.

    Every distinct block is read once per layer, for all requests that hold it, each of which sees
    it at an offset of its own.

    Args:
        contexts: the placed blocks of each request.
        layouts: rotary layout per layer.
        device: where queries are.
        prefill_tokens, decode_tokens: join blocks of fewer tokens, where the same requests read
            them at the same distances, for queries of several tokens and of one token; None: what
            is good on the device.
    """

    def __init__(
        self,
        contexts: Sequence[Context],
        layouts: Sequence[RotaryLayout],
        device: torch.device,
        *,
        prefill_tokens: int | None = None,
        decode_tokens: int | None = None,
    ) -> None:
        defaults = _tokens_to_join(device)
        self._prefill_tokens = defaults[0] if prefill_tokens is None else prefill_tokens
        self._decode_tokens = defaults[1] if decode_tokens is None else decode_tokens
        self._contexts = contexts
        self._layouts = layouts
        self._device = device

    @cached_property
    def _prefill(self) -> _Reading:
        return self._reading(self._prefill_tokens)

    @cached_property
    def _decode(self) -> _Reading:
        if self._decode_tokens == self._prefill_tokens:
            return self._prefill  # joined once
        return self._reading(self._decode_tokens)

    def _reading(self, tokens: int) -> _Reading:
        segments = _segments(self._contexts, tokens)
        return _Reading(segments, self._layouts, len(self._contexts), self._device)

    def _reading_for(self, tokens: int) -> _Reading:
        """What queries of that many tokens read: a token of an answer, or a prompt."""
        return self._decode if tokens == 1 else self._prefill

    def attend(
        self,
        layer: int,
        query: Tensor,
        tail_key: Tensor,
        tail_value: Tensor,
        scale: float,
        tail_mask: Tensor | None,
    ) -> Tensor:
        """Attention of the final block's queries to all blocks and to the tail.

        Args:
            layer: index of the layer.
            query: ``[B, H, Q, D]``, rotated for the queries' own positions. ``B`` is a multiple of
                the number of requests: beams of one request follow one another.
            tail_key, tail_value: ``[B, K, T, D]``: final block and generated tokens.
            tail_mask: bool ``[B, 1, Q, T]``, True where seen; None: all.

        Returns:
            ``[B, H, Q, D]`` in the query's dtype.
        """
        alone = self._reading_alone(query, tail_value)
        if alone and tail_mask is None and query.shape[2] == 1:
            joint = alone.attend_token(layer, query, tail_key, tail_value, scale)
            return _unfold(joint, query)
        groups = query.shape[1] // tail_key.shape[1]
        tail_mask = _fold_mask(tail_mask, groups)
        tail = attend(_fold(query, groups), tail_key, tail_value, scale, tail_mask)
        onward = alone.attend_onward(layer, query, tail, scale) if alone else None
        if onward is not None:
            return _unfold(onward, query)
        parts = [*self._attend_blocks(layer, query, groups, scale), tail]
        whole = merge(parts) if len(parts) > 1 else tail
        return _unfold(whole.output, query).to(query.dtype)

    def _reading_alone(self, query: Tensor, value: Tensor) -> _Reading | None:
        """What one request reads that reads no block twice, in float32 on the CPU; else None: other
        types would round the scores, and other devices have kernels that do better."""
        rows, _, tokens, _ = query.shape
        # Gradients would need what the buffer held before.
        if (
            query.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
            or torch.is_grad_enabled()
        ):
            return None
        if not (query.dtype == value.dtype == torch.float32 and rows == len(self._contexts) == 1):
            return None
        reading = self._reading_for(tokens)
        return reading if reading.is_one_each else None

    def _attend_blocks(self, layer: int, query: Tensor, groups: int, scale: float) -> list[Partial]:
        """Partials over the context's blocks, each ``[B, K, G * Q, D]``."""
        reading = self._reading_for(query.shape[2])
        beams = query.shape[0] // len(self._contexts)
        parts = reading.attend(layer, _beams_to_rows(query, beams), groups, scale)
        if beams == 1:
            return parts
        return [Partial(*(_rows_to_beams(t, beams, groups) for t in part)) for part in parts]


def _beams_to_rows(query: Tensor, beams: int) -> Tensor:
    """``[R * beams, H, Q, D]`` to ``[R, H, beams * Q, D]``: beams see the same context."""
    if beams == 1:
        return query
    rows, heads, tokens, size = query.shape
    split = query.reshape(rows // beams, beams, heads, tokens, size)
    return split.transpose(1, 2).reshape(rows // beams, heads, beams * tokens, size)


def _rows_to_beams(part: Tensor, beams: int, groups: int) -> Tensor:
    """``[R, K, G * beams * Q, ...]`` to ``[R * beams, K, G * Q, ...]``."""
    requests, heads, rows, *rest = part.shape
    tokens = rows // (groups * beams)
    split = part.reshape(requests, heads, groups, beams, tokens, *rest)
    moved = split.movedim(3, 1)
    return moved.reshape(requests * beams, heads, groups * tokens, *rest)


def _attend_shared(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Several requests' queries ``[R, K, Q, D]`` over one block's keys ``[K, N, D]``, read once."""
    requests, heads, rows, size = query.shape
    if requests == 1:
        return attend(query, key[None], value[None], scale)
    flat = query.transpose(0, 1).reshape(1, heads, requests * rows, size)
    part = attend(flat, key[None], value[None], scale)
    output = part.output.reshape(heads, requests, rows, -1).transpose(0, 1)
    return Partial(output, part.lse.reshape(heads, requests, rows).transpose(0, 1))


def _fold(query: Tensor, groups: int) -> Tensor:
    """``[B, H, Q, D]`` to ``[B, K, G * Q, D]``: heads that share keys become rows."""
    batch, heads, rows, size = query.shape
    return query.reshape(batch, heads // groups, groups * rows, size)


def _unfold(output: Tensor, query: Tensor) -> Tensor:
    """Back to ``[B, H, Q, D]``."""
    return output.reshape(*query.shape[:3], output.shape[-1])


def _fold_mask(mask: Tensor | None, groups: int) -> Tensor | None:
    """``[B, 1, Q, T]`` to ``[B, 1, G * Q, T]``."""
    return None if mask is None else mask.repeat(1, 1, groups, 1)


def _slots(requests: Sequence[int]) -> list[int]:
    """A place for each reader in the table of partials: counts up within a request."""
    used: dict[int, int] = {}
    slots = []
    for request in requests:
        slots.append(used.get(request, 0))
        used[request] = slots[-1] + 1
    return slots
