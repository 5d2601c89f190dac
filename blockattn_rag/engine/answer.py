"""Answers in progress, which detokenize generated tokens and pass the text to the caller."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.engine.results import Clock, FinishReason, Generation, ReuseStats
from blockattn_rag.kv.context import Context
from blockattn_rag.model import BlockModel
from blockattn_rag.model.decoding import end_token_ids, stop_strings


class Prepared(NamedTuple):
    """A prompt that is ready for the model."""

    context_ids: list[int]
    final_ids: list[int]
    context: Context  # Empty in full mode.
    limit: int  # Maximum number of tokens to generate.
    stats: ReuseStats
    is_hit: Sequence[bool] = ()  # Whether each context block was a hit.
    may_change: Sequence[bool] = ()  # Whether each block's tokens may be recomputed.
    recomputed_tokens: int = 0  # Number of tokens to recompute.

    def recomputed(self, context: Context, chosen: Sequence[int], seconds: float) -> Prepared:
        """Return a copy with the recomputed ``context``. ``chosen``: Sorted indices of recomputed
        tokens. The statistics add ``seconds``, and count ``chosen`` tokens of hits as computed."""
        reused, end = 0, 0
        for block, is_hit in zip(self.context.blocks, self.is_hit, strict=True):
            start, end = end, end + block.kv.num_tokens
            if is_hit:
                reused += bisect_left(chosen, end) - bisect_left(chosen, start)
        stats = replace(self.after(-reused).stats, fetch_s=self.stats.fetch_s + seconds)
        return self._replace(context=context, stats=stats)

    def after(self, known: int) -> Prepared:
        """Return a copy in which ``known`` more tokens count as reused instead of computed."""
        stats = replace(
            self.stats,
            reused_tokens=self.stats.reused_tokens + known,
            computed_tokens=self.stats.computed_tokens - known,
        )
        return self._replace(stats=stats)


class Answer:
    """Answer to one request, which is generated token by token."""

    def __init__(self, pending: PendingRequest, prepared: Prepared, model: BlockModel) -> None:
        self.pending = pending
        self._prepared = prepared
        self.options: GenerateOptions = pending.options
        self._model = model
        self.restart()

    def restart(self) -> None:
        self.prepared = self._prepared
        hf_model, sampling = self._model.hf_model, self.options.sampling
        tokenizer = self._model.tokenizer.tokenizer
        self.clock = Clock(self.pending.started)
        self._detokenizer = Detokenizer(tokenizer, stop_strings(hf_model, sampling))
        self._end_ids = end_token_ids(hf_model, tokenizer, sampling.extra)
        self._guard = self._model.loop_guard(sampling)
        self._ids: list[int] = []
        # Numbers of characters and tokens passed to the caller so far.
        self._shown_characters = self._shown_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether the answer has reached a stop string or repeats itself."""
        repeats = self._guard is not None and self._guard.must_end
        return self._detokenizer.stopped or repeats

    @property
    def has_ended(self) -> bool:
        return self.pending.answer.done()

    @property
    def can_restart(self) -> bool:
        """Whether the answer can start over, because it has not ended and no text was streamed."""
        has_shown = self._shown_characters > 0 and self.pending.on_chunk is not None
        return not (self.has_ended or has_shown)

    def push(self, token: int) -> None:
        self.clock.note_token()
        self._ids.append(token)
        self._detokenizer.push(token)
        if self._guard is not None:
            self._guard.push(token)
        self._show()

    def push_row(self, token: int, *, completes: bool) -> bool:
        """Add the newest token of this answer's row in a batch, unless the answer has ended: later
        tokens are padding. Returns whether the answer has ended. ``completes``: Whether to complete
        the answer after its last token."""
        if self.pending.left or self.has_ended:
            return True
        self.push(token)
        is_last = self.stopped or token in self._end_ids
        if is_last and completes:
            self.complete(self._ids)
        return is_last

    def complete(self, ids: Sequence[int]) -> None:
        if self.has_ended:
            return
        for token in ids[len(self._ids) :]:
            self.push(token)
        self._detokenizer.finish()
        self._show()
        self.pending.answer.set_result(self._generation(list(ids)))

    def _show(self) -> None:
        text, count = self._detokenizer.text, len(self._detokenizer.ids)
        if len(text) > self._shown_characters:
            new_ids = self._ids[self._shown_tokens : count]
            self.pending.emit(text[self._shown_characters :], new_ids)
            self._shown_characters, self._shown_tokens = len(text), count

    def _generation(self, ids: list[int]) -> Generation:
        ids = ids[: len(self._detokenizer.ids)]  # Beams and draft tokens can run past stop strings.
        ended = bool(ids) and ids[-1] in self._end_ids
        reason: FinishReason = "length"
        if self.stopped or ended or len(ids) < self.prepared.limit:
            has_loop = self._guard is not None and self._guard.has_loop
            reason = "repetition" if has_loop else "stop"
        stats = self.clock.complete(self.prepared.stats, len(ids))
        return Generation(self._detokenizer.text, ids, reason, stats)
