"""Tails: cached keys and values of final blocks and answers, mostly for the next chat turn.

Text after the last passage attends to everything before it, so its keys and values are only valid
after the same context. If a later prompt has the same context, the longest common prefix of its
final block and an earlier tail is reused, without changing the answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from blockattn_rag.engine.answer import Prepared
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.model import BlockModel
from blockattn_rag.model.caches import States
from blockattn_rag.model.decoding import fills_in_order
from blockattn_rag.model.probe import check_ready

SHARE = 4
"""Tails may use ``1 / SHARE`` of an engine's ``resident_bytes``, in addition to its blocks."""

_MOST = 64


class Start(NamedTuple):
    """Cached prefix of a final block."""

    base: Hashable | None = None  # Context of the prefix. None: tails are neither used nor kept.
    tokens: int = 0
    states: States = ()  # States of at least `tokens` tokens, the prefix first.


NOTHING = Start()


class _Tail(NamedTuple):
    base: Hashable
    ids: Sequence[int]
    states: States

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.states)


class Tails:
    """LRU cache for the tails of an engine's recent answers. Callers must hold the model's lock.

    ``max_bytes``: Maximum size of all keys and values. 0 disables the cache.
    """

    def __init__(self, model: BlockModel, max_bytes: int) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._kept: list[_Tail] = []  # Least recently used first.

    def begin(self, prepared: Prepared, options: GenerateOptions) -> Start:
        """Look up the longest cached prefix of a prompt's final block, without its last token.

        Tails are neither used nor kept in full mode, with beams, speculative decoding or options
        for transformers' ``generate``, if the recipe recomputes tokens, or in autocast or training.
        """
        if not self._max_bytes or options.mode != "block" or options.recipe.recompute:
            return NOTHING
        sampling = options.sampling
        if sampling.extra or not fills_in_order(self._model.hf_model, sampling):
            return NOTHING
        try:
            check_ready(self._model.hf_model)
        except ValueError:
            return NOTHING
        base = tuple((b.kv.key, b.kv.scales is None, b.shift) for b in prepared.context.blocks)
        ids = prepared.final_ids[:-1]
        known = [tail for tail in self._kept if tail.base == base]
        best = max(known, key=lambda tail: _common(tail.ids, ids), default=None)
        if best is None or not (tokens := _common(best.ids, ids)):
            return Start(base)
        self._use(best)
        return Start(base, tokens, best.states)

    def keep(self, start: Start, prepared: Prepared, answer_ids: Sequence[int], cache: Any) -> None:
        """Keep the tail of an answer that began with ``start``, except for its last token, whose
        keys and values were not computed."""
        ids = [*prepared.final_ids, *answer_ids[:-1]]
        before = len(prepared.context_ids)
        is_complete = cache is not None and cache.get_seq_length() == before + len(ids)
        too_large = len(ids) * self._model.bytes_per_token > self._max_bytes
        if start.base is None or not is_complete or too_large:
            return
        alike = [tail for tail in self._kept if tail.base == start.base]
        if longer := next((tail for tail in alike if _common(tail.ids, ids) == len(ids)), None):
            self._use(longer)
            return
        with suppress(torch.OutOfMemoryError):  # The answer is not affected.
            if states := cache.tail_states(len(ids)):
                shorter = {id(tail) for tail in alike if _common(tail.ids, ids) == len(tail.ids)}
                self._kept = [tail for tail in self._kept if id(tail) not in shorter]
                self._kept.append(_Tail(start.base, ids, states))
                held = sum(tail.nbytes for tail in self._kept)
                while held > self._max_bytes or len(self._kept) > _MOST:
                    held -= self._kept.pop(0).nbytes

    def _use(self, tail: _Tail) -> None:
        self._kept = [*(kept for kept in self._kept if kept is not tail), tail]


def _common(ids: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(ids, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ids), len(other)))
