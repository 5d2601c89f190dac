"""Runs the model for prompts that wait: prepares them, and answers them alone or in one batch."""

from __future__ import annotations

import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from itertools import chain, groupby
from typing import Any, NamedTuple

from torch import Tensor

from blockattn_rag.engine.answer import Answer, Prepared
from blockattn_rag.engine.fetcher import BlockFetcher, Fetched, Name
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.engine.tails import NOTHING, Start, Tails
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.kv.context import Context, place
from blockattn_rag.model import BlockModel
from blockattn_rag.model.caches import add_states, empty_cache
from blockattn_rag.prompts.blocks import Block, BlockPrompt, promoted


class _Chosen(NamedTuple):
    """What promotion does to a context.

    ``stay``, ``moved``: the blocks that stay, and those that move to the final block; ``missed``,
    ``computed_tokens``: what had to be computed to choose.
    """

    stay: list[Block]
    moved: list[Block]
    missed: Mapping[Name, int]
    computed_tokens: int


class Runner:
    """Answers requests of one engine, on the model's thread.

    Args:
        model: the model.
        fetcher: gets the blocks of prompts.
        tail_bytes: of what answers compute behind their contexts, how much is kept; see ``tails``.
    """

    def __init__(self, model: BlockModel, fetcher: BlockFetcher, tail_bytes: int = 0) -> None:
        self._model = model
        self._fetcher = fetcher
        self._tails = Tails(model, tail_bytes)

    def answer_batch(self, requests: Sequence[PendingRequest]) -> None:
        """Give every request its answer or its own error.

        Requests with equal options share each forward of the model where that gives the answers
        that each gets alone.
        """
        answers = [answer for one in requests if (answer := self._begin(one)) is not None]
        answers.sort(key=_limit)  # each row of a batch gets as many tokens
        for _, alike in groupby(answers, key=_limit):
            for run in self._runs(list(alike)):
                if len(run) == 1:
                    self._answer_alone(run[0])
                else:
                    self._answer_together(run)

    # -- preparing ---------------------------------------------------------------------------

    def _begin(self, request: PendingRequest) -> Answer | None:
        """An answer that is ready to be computed."""
        try:
            if request.left:  # while others were prepared
                raise CancelledError
            options = request.options
            prompt = request.prompt()
            self._model.matcher(options.sampling.grammar)  # refused before anything is computed
            prepared = self.prepare(prompt, options)
        except KeyboardInterrupt:  # which is no request's own error: it ends the whole batch
            raise
        except BaseException as error:  # noqa: BLE001 -- raised again by the caller
            request.fail(error)
            return None
        return Answer(request, prompt, prepared, self._model)

    def prepare(self, prompt: BlockPrompt, options: GenerateOptions) -> Prepared:
        """Tokenise a prompt (full mode), or fetch and place its blocks (block mode)."""
        if options.mode == "block":
            return self._prepare_blocks(prompt, options)
        tokenizer = self._model.tokenizer
        ids = tokenizer.prompt_ids(prompt)
        limit = self._model.room_for(len(ids.flat), options.sampling)
        context_ids = [token for block in ids.context for token in block]
        stats = ReuseStats("full", computed_tokens=len(ids.flat))
        return Prepared(context_ids, ids.final, None, limit, stats)

    def _prepare_blocks(self, prompt: BlockPrompt, options: GenerateOptions) -> Prepared:
        started = time.perf_counter()
        tokenizer = self._model.tokenizer
        context, question = tokenizer.with_final_ids(prompt)
        chosen = self._promoted(context, question, options)
        moved_ids = [
            tokenizer.block_ids(block, first=not chosen.stay and not place)
            for place, block in enumerate(chosen.moved)
        ]
        final = [*chain.from_iterable(moved_ids), *question]
        fetched = self._fetch(chosen.stay, len(final), options)
        fetched = fetched._replace(missed={**chosen.missed, **fetched.missed})
        placed = place(fetched.blocks, options.recipe.positions)
        limit = self._model.room_for(placed.num_tokens + len(final), options.sampling)
        stats = ReuseStats(
            "block",
            hits=fetched.hits,
            misses=fetched.misses,
            reused_tokens=fetched.reused_tokens,
            computed_tokens=fetched.missed_tokens + len(final) + chosen.computed_tokens,
            promoted_tokens=sum(map(len, moved_ids)) + chosen.computed_tokens,
            fetch_s=time.perf_counter() - started,
            int8_blocks=sum(kv.scales is not None for kv in fetched.blocks),
            recipe=str(options.recipe),
        )
        return Prepared(placed.token_ids, final, placed, limit, stats)

    def _promoted(
        self, context: Sequence[Block], question: Sequence[int], options: GenerateOptions
    ) -> _Chosen:
        """Choose the passages that move to the final block: by the question's attention."""
        count = options.recipe.promote
        if not count or not any(block.is_passage for block in context):
            return _Chosen(list(context), [], {}, 0)
        fetched = self._fetch(context, len(question), options)
        placed = place(fetched.blocks, options.recipe.positions)
        # By place, and not by handle: texts of equal tokens share one stored block.
        attention = [0.0] * len(context)
        if placed.blocks:
            masses = self._model.attention_to_blocks(placed, question)
            for at, mass in zip(fetched.places, masses, strict=True):
                attention[at] = mass
        stay, moved = promoted(context, attention, count)
        return _Chosen(stay, moved, fetched.missed, len(question))

    def _fetch(
        self, context: Sequence[Block], final_tokens: int, options: GenerateOptions
    ) -> Fetched:
        def check_room(tokens: int) -> int:
            return self._model.room_for(tokens + final_tokens, options.sampling)

        return self._fetcher.fetch(context, options.on_miss, check_room, recipe=options.recipe)

    def answer_logits(
        self, prompt: BlockPrompt, answer_ids: Sequence[int], options: GenerateOptions
    ) -> Tensor:
        """What the model predicts at each token of a given answer; see ``BlockModel``."""
        prepared = self.prepare(prompt, options)
        if prepared.limit < len(answer_ids):
            raise ContextOverflowError(
                f"prompt and answer do not fit in the model's {self._model.max_context_tokens} "
                f"tokens: there is room for {prepared.limit} of {len(answer_ids)} answer tokens"
            )
        cache = None
        if prepared.context is not None:
            given = len(prepared.final_ids) + len(answer_ids) - 1
            cache = self._cache_for([prepared.context], given, options)
        return self._model.answer_logits(
            prepared.context_ids, prepared.final_ids, answer_ids, cache
        )

    # -- answering ---------------------------------------------------------------------------

    def _answer_alone(self, answer: Answer) -> None:
        try:
            answer.complete(self._ids_alone(answer))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 -- raised again by the caller
            traceback.clear_frames(error.__traceback__)  # which hold the cache
            answer.request.fail(error)

    def _ids_alone(self, answer: Answer) -> list[int]:
        request, prepared = answer.request, answer.prepared
        sampling = answer.options.sampling
        with self._model.running(sampling):
            if request.left:  # while others had the model
                raise CancelledError
            start = self._tails.begin(prepared, answer.options)
            answer.prepared = prepared.after(start.tokens)
            cache = self._cache([answer], start)
            ids = self._model.generate(
                prepared.context_ids,
                prepared.final_ids,
                sampling,
                cache=cache,
                on_token=answer.push,
                is_cancelled=lambda: answer.stopped or request.left,
            )
            self._tails.keep(start, prepared, ids, cache)
            return ids

    def _answer_together(self, answers: Sequence[Answer]) -> None:
        """Answer several requests in one forward for each token. A batch fails as a whole; then
        each request gets its own answer or its own error."""
        try:
            self._run_batch(answers)
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 -- raised again by the callers
            failure = error
            traceback.clear_frames(error.__traceback__)  # which hold the cache
        for answer in answers:
            if answer.can_start_anew:
                answer.start_anew()
                self._answer_alone(answer)
            else:
                answer.request.fail(failure)

    def _run_batch(self, answers: Sequence[Answer]) -> None:
        sampling = answers[0].options.sampling

        def nobody_waits() -> bool:
            return all(one.request.left or one.has_ended for one in answers)

        def on_tokens(tokens: Sequence[int]) -> list[bool]:
            rows = zip(answers, tokens, strict=True)
            return [answer.push_batched(token) for answer, token in rows]

        with self._model.running(sampling):
            if nobody_waits():  # since others had the model
                raise CancelledError
            rows = self._model.generate_batch(
                [(one.prepared.context_ids, one.prepared.final_ids) for one in answers],
                sampling,
                cache=self._cache(answers),
                on_tokens=on_tokens,
                is_cancelled=nobody_waits,
                grammars=[one.options.sampling.grammar for one in answers],
                on_failure=lambda place, error: answers[place].request.fail(error),
            )
        for answer, ids in zip(answers, rows, strict=True):
            answer.complete(ids)

    def _runs(self, answers: Sequence[Answer]) -> list[list[Answer]]:
        """Cut a batch so that no forward has more tokens than the model encodes at once."""
        runs: list[list[Answer]] = []
        widest = 0
        for answer in answers:
            context_ids, final_ids, context, *_ = answer.prepared
            width = len(final_ids) + (0 if context else len(context_ids))
            widest = max(widest, width)
            if not runs or widest * (len(runs[-1]) + 1) > self._model.batch_tokens:
                runs.append([])
                widest = width
            runs[-1].append(answer)
        return runs

    def _cache(self, answers: Sequence[Answer], start: Start = NOTHING) -> Any:
        """The prompts' contexts as a cache for the model, and what is known of a single prompt's
        final block; None: the model makes its own."""
        assembling = time.perf_counter()
        contexts = [one.prepared.context or Context(()) for one in answers]
        cache = None
        if any(context.blocks for context in contexts):
            longest = max(len(one.prepared.final_ids) for one in answers)
            cache = self._cache_for(contexts, longest - start.tokens, answers[0].options)
        elif start.base is not None:
            cache = empty_cache(self._model.config)
        if cache is not None:
            add_states(cache, start.states, start.tokens)
        for answer in answers:
            answer.clock.assembling = assembling
            answer.clock.prefilling = time.perf_counter()
        return cache

    def _cache_for(
        self, contexts: Sequence[Context], final_tokens: int, options: GenerateOptions
    ) -> Any:
        assembly = self._model.choose_assembly(options.assembly, final_tokens)
        return self._model.cache_for(*contexts, assembly=assembly)


def _limit(answer: Answer) -> int:
    return answer.prepared.limit
