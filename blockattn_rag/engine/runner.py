"""Answers of the model to prepared requests, one by one or several in one forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blockattn_rag.engine.detokenizer import AnswerText
from blockattn_rag.engine.options import Request
from blockattn_rag.engine.results import Clock, Generation, ReuseStats
from blockattn_rag.engine.scheduler import Seat
from blockattn_rag.kv.context import Assembly, Context
from blockattn_rag.model import BlockModel


class Prepared(NamedTuple):
    """A request ready for the model: token ids, placed blocks (block mode), figures so far.

    ``limit``: tokens that may be generated.
    """

    context_ids: list[int]
    final_ids: list[int]
    context: Context | None
    limit: int
    stats: ReuseStats


class Call(NamedTuple):
    """A request, what was prepared for it, and who waits for its answer."""

    request: Request
    prepared: Prepared
    seat: Seat


def _ignore(text: str) -> None:
    """For answers that nobody reads as they come."""


def _never() -> bool:
    """For answers that nobody cancels."""
    return False


class Answerer:
    """Runs the model, which takes one request or one batch at a time.

    Args:
        model: the model.
    """

    def __init__(self, model: BlockModel) -> None:
        self.model = model

    def answer(
        self,
        request: Request,
        prepared: Prepared,
        on_text: Callable[[str], object] = _ignore,
        is_cancelled: Callable[[], bool] = _never,
    ) -> Generation:
        """Answer one request.

        Args:
            request, prepared: the request.
            on_text: gets each piece of the answer as soon as it is certain.
            is_cancelled: asked before each token; True ends the answer with what there is.
        """
        answer = AnswerText(self.model.tokenizer.tokenizer, request.sampling.stop)
        clock = Clock(request.started)

        def on_token(token: int) -> None:
            clock.note_token()
            if text := answer.push(token):
                on_text(text)

        with self.model.running(request.sampling):
            if is_cancelled():  # while waiting for the model
                return self._generation(answer, [], prepared, clock)
            clock.assembling = time.perf_counter()
            cache = self._cache([prepared], request.reuse.assembly)
            clock.prefilling = time.perf_counter()
            ids = self.model.generate(
                prepared.context_ids,
                prepared.final_ids,
                request.sampling,
                cache=cache,
                on_token=on_token,
                is_cancelled=lambda: answer.stopped or is_cancelled(),
            )
        if clock.first_token is None:  # beam search hands out no token before its end
            for token in ids:
                on_token(token)
        if rest := answer.finish():
            on_text(rest)
        return self._generation(answer, ids, prepared, clock)

    def answer_batch(self, calls: Sequence[Call]) -> None:
        """Give every seat its answer, of several calls in one forward where that is exact.

        The calls' requests differ in their prompts alone.
        """
        can_share = self.model.batches_exactly(calls[0].request.sampling)
        shares = can_share and len({call.prepared.limit for call in calls}) == 1
        for run in self._runs(calls) if shares else [[call] for call in calls]:
            if len(run) == 1:
                request, prepared, seat = run[0]
                answer = self.answer(request, prepared, is_cancelled=seat.left.is_set)
                seat.answer.set_result(answer)
            else:
                self._answer_run(run)

    def _runs(self, calls: Sequence[Call]) -> list[list[Call]]:
        """Cut a batch so that no forward has more tokens than the model encodes at once."""
        runs: list[list[Call]] = []
        widest = 0
        for call in calls:
            context_ids, final_ids, context, *_ = call.prepared
            width = len(final_ids) + (0 if context else len(context_ids))
            widest = max(widest, width)
            if not runs or widest * (len(runs[-1]) + 1) > self.model.batch_tokens:
                runs.append([])
                widest = width
            runs[-1].append(call)
        return runs

    def _answer_run(self, calls: Sequence[Call]) -> None:
        """Answer prompts in one forward of each step."""
        request, clock = calls[0].request, Clock(calls[0].request.started)
        prepared = [call.prepared for call in calls]

        def nobody_waits() -> bool:
            return all(call.seat.left.is_set() for call in calls)

        def on_tokens(_: list[int]) -> bool:
            clock.note_token()
            return nobody_waits()

        with self.model.running(request.sampling):
            clock.assembling = time.perf_counter()
            rows: Sequence[list[int]] = [[] for _ in calls]
            if not nobody_waits():  # since before the model was free
                cache = self._cache(prepared, request.reuse.assembly)
                clock.prefilling = time.perf_counter()
                rows = self.model.generate_batch(
                    [(p.context_ids, p.final_ids) for p in prepared],
                    request.sampling,
                    cache=cache,
                    on_tokens=on_tokens,
                )
        for call, ids in zip(calls, rows, strict=True):
            answer = AnswerText(self.model.tokenizer.tokenizer, request.sampling.stop)
            for token in ids:
                answer.push(token)
            answer.finish()
            clock.started = call.request.started
            call.seat.answer.set_result(self._generation(answer, ids, call.prepared, clock))

    def _cache(self, prepared: Sequence[Prepared], assembly: Assembly) -> Any:
        """The prompts' contexts as a cache for the model; None in full mode."""
        contexts = [p.context or Context(()) for p in prepared]
        if not any(context.blocks for context in contexts):
            return None
        longest = max(len(p.final_ids) for p in prepared)
        chosen = self.model.choose_assembly(assembly, longest)
        return self.model.cache_for(*contexts, assembly=chosen)

    def _generation(
        self, answer: AnswerText, ids: list[int], prepared: Prepared, clock: Clock
    ) -> Generation:
        ids = ids[: answer.num_tokens]  # one more came before the stop string was seen
        ended = bool(ids) and ids[-1] in self.model.end_token_ids
        stopped = answer.stopped or ended or len(ids) < prepared.limit
        stats = clock.complete(prepared.stats, len(ids))
        return Generation(answer.text, ids, "stop" if stopped else "length", stats)
