"""One answer in progress: turns tokens into text and passes it to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.engine.results import (
    Clock,
    FinishReason,
    Generation,
    GenerationChunk,
    Marks,
    ReuseStats,
    marks_at_end,
)
from blockattn_rag.kv.context import Context
from blockattn_rag.model import BlockModel
from blockattn_rag.model.decoding import end_token_ids, stop_strings
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.output.thinking import ThoughtReader, has_no_thoughts
from blockattn_rag.prompts.blocks import BlockPrompt


class Prepared(NamedTuple):
    """A prompt ready for the model.

    Args:
        context_ids: Token ids of the context.
        final_ids: Token ids of the final block.
        context: The placed blocks: in full mode none.
        limit: Number of tokens that may be generated.
        stats: Figures so far.
        fingerprint: Fingerprint of the model that the blocks belong to. Empty in full mode.
    """

    context_ids: list[int]
    final_ids: list[int]
    context: Context
    limit: int
    stats: ReuseStats
    fingerprint: str = ""

    def after(self, known: int) -> Prepared:
        """The same prompt with ``known`` tokens of the final block reused."""
        stats = replace(
            self.stats,
            reused_tokens=self.stats.reused_tokens + known,
            computed_tokens=self.stats.computed_tokens - known,
        )
        return self._replace(stats=stats)


class Answer:
    """One answer in progress.

    Args:
        request: The request that it answers.
        prompt: The request's prompt.
        prepared: The prompt, ready for the model.
        model: The model that answers.
    """

    def __init__(
        self, request: PendingRequest, prompt: BlockPrompt, prepared: Prepared, model: BlockModel
    ) -> None:
        self.request = request
        self.prepared = prepared
        self.options: GenerateOptions = request.options
        self._prompt = prompt
        self._model = model
        self.restart()

    def restart(self) -> None:
        """Discard all tokens."""
        hf_model, sampling = self._model.hf_model, self.options.sampling
        tokenizer = self._model.tokenizer.tokenizer
        self.clock = Clock(self.request.started)
        stop = stop_strings(hf_model, sampling)
        self._detokenizer = Detokenizer(tokenizer, stop, sampling.keep_tokens)
        self._end_ids = end_token_ids(hf_model, tokenizer, sampling.extra)
        self._guard = self._model.loop_guard(sampling)
        self._calls = CallWatch(sampling, tokenizer, self._prompt) if sampling.calls else None
        self._ids: list[int] = []
        self._given = 0  # characters passed to the caller

    @property
    def stopped(self) -> bool:
        """Whether the answer ended before the model ended it: at a stop string, because it repeats
        itself, or because no further tool call is allowed."""
        repeats = self._guard is not None and self._guard.must_end
        is_over = self._calls is not None and self._calls.is_over
        return self._detokenizer.stopped or repeats or is_over

    @property
    def has_ended(self) -> bool:
        """Whether the request has its result."""
        return self.request.answer.done()

    @property
    def can_restart(self) -> bool:
        """Whether the caller has received nothing yet."""
        has_given = self._given > 0 and self.request.on_chunk is not None
        return not (self.has_ended or has_given)

    def push(self, token: int) -> None:
        """Take the next token, and pass on the text that has become certain."""
        self.clock.note_token()
        self._ids.append(token)
        self._detokenizer.push(token)
        if self._guard is not None:
            self._guard.push(token)
        self._give()

    def push_batched(self, token: int) -> bool:
        """``push`` for a row of a batch, which is padded once its answer has ended.

        Returns:
            Whether the answer has ended.
        """
        if self.request.left or self.has_ended:
            return True
        self.push(token)
        if self.stopped or token in self._end_ids:
            self.complete(self._ids)
        return self.has_ended

    def complete(self, ids: Sequence[int]) -> None:
        """Set the request's result to the answer with these tokens, some of which may be new."""
        if self.has_ended:
            return
        for token in ids[len(self._ids) :]:
            self.push(token)
        self._detokenizer.finish()
        self._give()
        self.request.answer.set_result(self._generation(list(ids)))

    def _give(self) -> None:
        """Pass new text to the caller."""
        text = self._detokenizer.text
        if len(text) > self._given:
            new, marks = text[self._given :], self._detokenizer.marks(self._given)
            if self._calls is not None:
                self._calls.push(new, marks)
            self.request.emit(new, marks)
            self._given = len(text)

    def _generation(self, ids: list[int]) -> Generation:
        ids = ids[: self._detokenizer.num_tokens]  # beams and drafts go past stop strings
        ended = bool(ids) and ids[-1] in self._end_ids
        reason: FinishReason = "length"
        if self.stopped or ended or len(ids) < self.prepared.limit:
            has_loop = any(one is not None and one.has_loop for one in (self._guard, self._calls))
            reason = "repetition" if has_loop else "stop"
        stats = self.clock.complete(self.prepared.stats, len(ids))
        marks = self._detokenizer.marks()
        return Generation(self._detokenizer.text, ids, reason, stats, marks)


class CallWatch:
    """Reads the tool calls of an answer as its text comes, without the model's thoughts.

    Args:
        sampling: The request's sampling, with ``calls``.
        tokenizer: A transformers tokenizer.
        prompt: The request's prompt.
    """

    def __init__(self, sampling: Sampling, tokenizer: Any, prompt: BlockPrompt) -> None:
        assert sampling.calls is not None
        at_once = has_no_thoughts(sampling.grammar.asked if sampling.grammar else {})
        self._reader = sampling.calls.reader()
        self._thoughts = ThoughtReader(tokenizer, prompt, answers_at_once=at_once)

    @property
    def is_over(self) -> bool:
        """Whether the answer ends here; see ``AnswerReader``."""
        return self._reader.is_over

    @property
    def has_loop(self) -> bool:
        """Whether the same call came twice in a row."""
        return self._reader.has_loop

    def push(self, text: str, marks: Marks) -> None:
        """Take the next piece of the answer, with its marks."""
        answer = self._thoughts.push(text).answer
        piece = GenerationChunk(text, marks=marks)
        self._reader.read(answer, marks_at_end(piece, answer), last=False)
