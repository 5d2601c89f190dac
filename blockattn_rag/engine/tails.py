"""Tails: what answers computed behind their contexts, kept in memory for the next turn's prompt.

A conversation grows at its end. Text after the last passage sees everything before it, so its keys
and values are no block's: they hold behind this very context alone. A prompt of the same context
whose final block begins as an earlier one did, the answer included, takes that part as it was
computed. Nothing else changes: the same attention reads the same states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from blockattn_rag.engine.answer import Prepared
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.kv.context import Context
from blockattn_rag.model import BlockModel
from blockattn_rag.model.caches import States, tail_states
from blockattn_rag.model.decoding import fills_in_order
from blockattn_rag.model.probe import check_ready

SHARE = 4
"""Tails take up to this part of an engine's ``resident_bytes``, beside its blocks: a quarter."""

_MOST = 64


class Start(NamedTuple):
    """What is known of a final block before it is computed.

    ``base``: what its keys and values depend on besides its tokens; None: they are neither taken
    from earlier ones nor kept. ``tokens``: of its first tokens, how many are known; ``states``: of
    these and maybe more.
    """

    base: Hashable = None
    tokens: int = 0
    states: States = ()


NOTHING = Start()


class _Tail(NamedTuple):
    base: Hashable
    ids: Sequence[int]
    states: States

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self.states)


class Tails:
    """The tails of one engine's last answers. Used by whoever holds the model's lock.

    Args:
        model: the model.
        max_bytes: keys and values kept at most, those used last; 0: none.
    """

    def __init__(self, model: BlockModel, max_bytes: int) -> None:
        self._model = model
        self._max_bytes = max_bytes
        self._kept: list[_Tail] = []  # the latest stands last

    def begin(self, prepared: Prepared, options: GenerateOptions) -> Start:
        """What earlier answers know of a prompt's final block; at least one token is left."""
        base = self._base(prepared, options)
        known = [one for one in self._kept if one.base == base]
        if base is None or not known:
            return Start(base)
        wanted = prepared.final_ids[:-1]
        tokens, best = max(
            ((_common(one.ids, wanted), one) for one in known), key=lambda found: found[0]
        )
        if not tokens:
            return Start(base)
        self._use(best)
        return Start(base, tokens, best.states)

    def keep(self, start: Start, prepared: Prepared, answer_ids: Sequence[int], cache: Any) -> None:
        """Keep what an answer that began so has computed: its last token alone has no states."""
        ids = [*prepared.final_ids, *answer_ids[:-1]]
        before = len(prepared.context_ids)
        is_whole = cache is not None and cache.get_seq_length() == before + len(ids)
        too_large = len(ids) * self._model.bytes_per_token > self._max_bytes
        # The model may have been set otherwise meanwhile.
        if start.base is None or not is_whole or too_large or not self._still(start.base):
            return
        alike = [one for one in self._kept if one.base == start.base]
        if longer := next((one for one in alike if _common(one.ids, ids) == len(ids)), None):
            self._use(longer)
            return
        with suppress(torch.OutOfMemoryError):  # no reason not to answer
            if states := tail_states(cache, len(ids)):
                shorter = {id(one) for one in alike if _common(one.ids, ids) == len(one.ids)}
                self._kept = [one for one in self._kept if id(one) not in shorter]
                self._kept.append(_Tail(start.base, ids, states))
                self._shrink()

    def _base(self, prepared: Prepared, options: GenerateOptions) -> Hashable:
        """What a final block's states depend on; None where none are taken or kept: in full mode,
        which reuses nothing, with promoted passages, and with options of ``generate``'s own."""
        is_plain = prepared.context is not None and not options.recipe.promote
        in_order = fills_in_order(self._model.hf_model, options.sampling)
        if not (self._max_bytes and is_plain and in_order):
            return None
        if (fingerprint := self._fingerprint()) is None:
            return None
        context = prepared.context or Context(())
        blocks = [(b.kv.key, b.kv.scales is None, b.shift) for b in context.blocks]
        # How blocks are attended to changes rounding alone; but what was asked for is done.
        return fingerprint, tuple(blocks), options.assembly

    def _fingerprint(self) -> str | None:
        """The model as it is set now; None where it would compute other states than that tells."""
        with suppress(ValueError):
            check_ready(self._model.hf_model)
            return self._model.fingerprint
        return None

    def _still(self, base: Any) -> bool:
        return bool(base[0] == self._fingerprint())

    def _use(self, tail: _Tail) -> None:
        self._kept = [*(one for one in self._kept if one is not tail), tail]

    def _shrink(self) -> None:
        held = sum(one.nbytes for one in self._kept)
        while held > self._max_bytes or len(self._kept) > _MOST:
            held -= self._kept.pop(0).nbytes


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two rows have in common at their beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
