"""One answer in the making: from tokens to text, to whoever waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from blockattn_rag.engine.call_watch import CallWatch
from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.engine.results import Clock, FinishReason, Generation, ReuseStats
from blockattn_rag.kv.context import Context
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt


class Prepared(NamedTuple):
    """A prompt ready for the model: token ids, placed blocks (block mode), figures so far.

    ``limit``: tokens that may be generated.
    """

    context_ids: list[int]
    final_ids: list[int]
    context: Context | None
    limit: int
    stats: ReuseStats

    def after(self, known: int) -> Prepared:
        """The same prompt, where the final block's first ``known`` tokens need not be computed."""
        stats = replace(
            self.stats,
            reused_tokens=self.stats.reused_tokens + known,
            computed_tokens=self.stats.computed_tokens - known,
        )
        return self._replace(stats=stats)


class Answer:
    """One answer in the making.

    Args:
        request: whose answer it is.
        prompt: the request's prompt.
        prepared: the prompt, ready for the model.
        model: what answers.
    """

    def __init__(
        self, request: PendingRequest, prompt: BlockPrompt, prepared: Prepared, model: BlockModel
    ) -> None:
        self.request = request
        self._prompt = prompt
        self.prepared = prepared
        self.options: GenerateOptions = request.options
        self._model = model
        self.start_anew()

    def start_anew(self) -> None:
        """Begin, or forget what has come."""
        self.clock = Clock(self.request.started)
        sampling = self.options.sampling
        self._detokenizer = Detokenizer(
            self._model.tokenizer.tokenizer,
            self._model.stop_strings(sampling),
            sampling.keep_tokens,
        )
        self._end_ids = self._model.end_ids(sampling)
        self._guard = self._model.loop_guard(sampling)
        self._calls = CallWatch.of(sampling, self._model.tokenizer.tokenizer, self._prompt)
        self._ids: list[int] = []
        self._given = 0  # characters

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come, or the answer repeats itself, or no further call of a
        tool may come."""
        repeats = self._guard is not None and self._guard.must_end
        is_over = self._calls is not None and self._calls.is_over
        return self._detokenizer.stopped or repeats or is_over

    @property
    def has_ended(self) -> bool:
        """Whether it needs no more tokens."""
        return self.request.answer.done()

    @property
    def can_start_anew(self) -> bool:
        """Whether the caller has got nothing yet."""
        has_given = self._given > 0 and self.request.on_chunk is not None
        return not (self.has_ended or has_given)

    def push(self, token: int) -> None:
        """Take the next token, and hand on the text that has become certain."""
        self.clock.note_token()
        self._ids.append(token)
        self._detokenizer.push(token)
        if self._guard is not None:
            self._guard.push(token)
        self._give()

    def push_batched(self, token: int) -> bool:
        """The same in a batch, which goes on with padding when this answer has ended; returns
        whether it has."""
        if self.request.left or self.has_ended:
            return True
        self.push(token)
        if self.stopped or token in self._end_ids:
            self.complete(self._ids)
        return self.has_ended

    def complete(self, ids: Sequence[int]) -> None:
        """All tokens of the answer are there: tell the caller, who may know of some or none yet."""
        if self.has_ended:
            return
        for token in ids[len(self._ids) :]:
            self.push(token)
        self._detokenizer.finish()
        self._give()
        self.request.answer.set_result(self._generation(list(ids)))

    def _give(self) -> None:
        """Hand text to whoever reads it as it comes."""
        text = self._detokenizer.text
        if len(text) > self._given:
            new, marks = text[self._given :], self._detokenizer.marks(self._given)
            if self._calls is not None:
                self._calls.push(new, marks)
            self.request.emit(new, marks)
            self._given = len(text)

    @property
    def _has_loop(self) -> bool:
        repeats = self._guard is not None and self._guard.has_loop
        return repeats or (self._calls is not None and self._calls.has_loop)

    def _generation(self, ids: list[int]) -> Generation:
        ids = ids[: self._detokenizer.num_tokens]  # beams and drafts go past stop strings
        ended = bool(ids) and ids[-1] in self._end_ids
        stopped = self.stopped or ended or len(ids) < self.prepared.limit
        stats = self.clock.complete(self.prepared.stats, len(ids))
        reason: FinishReason = "stop" if stopped else "length"
        if reason == "stop" and self._has_loop:
            reason = "repetition"
        marks = self._detokenizer.marks()
        return Generation(self._detokenizer.text, ids, reason, stats, marks)
