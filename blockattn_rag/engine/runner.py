"""Runner, which prepares the prompts of waiting requests and answers them in batches."""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from itertools import chain
from typing import Any, get_args

from torch import Tensor

from blockattn_rag.engine.answer import Answer, Prepared
from blockattn_rag.engine.fetcher import BlockFetcher
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.engine.tails import NOTHING, Tails
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.kv.context import Assembly, Context, place
from blockattn_rag.model import BlockModel
from blockattn_rag.model.caches import empty_cache
from blockattn_rag.model.decoding import fills_in_order
from blockattn_rag.model.recompute import recompute, tokens_to_recompute
from blockattn_rag.prompts.blocks import BlockPrompt


class Runner:
    """Part of an engine that prepares and answers requests, on the model's thread."""

    def __init__(
        self,
        model: BlockModel,
        fetcher: BlockFetcher,
        assembly: Assembly = "auto",
        tail_bytes: int = 0,
    ) -> None:
        if assembly not in get_args(Assembly):
            known = ", ".join(map(repr, get_args(Assembly)))
            raise ValueError(f"Unknown assembly {assembly!r}: expected one of {known}.")
        if assembly == "relay":
            # Raise errors now rather than during a request.
            model.choose_assembly(assembly, final_tokens=1)
        self._model = model
        self._fetcher = fetcher
        self._assembly: Assembly = assembly
        self._tails = Tails(model, tail_bytes)

    def answer_batch(self, batch: Sequence[PendingRequest]) -> None:
        """Answer requests with equal options. Each request gets its answer or its own error."""
        self._model.check_unchanged()
        answers = [answer for pending in batch if (answer := self._prepared(pending)) is not None]
        for together in self._batches(answers):
            self._answer(together)

    def can_share(self, options: GenerateOptions) -> bool:
        """Whether batching leaves the answers to requests with these options unchanged."""
        return self._model.batches_exactly(options.sampling)

    # -- preparing ---------------------------------------------------------------------------

    def _prepared(self, pending: PendingRequest) -> Answer | None:
        options = pending.options
        try:
            if pending.left:  # The caller may stop waiting while other requests are being prepared.
                raise CancelledError
            prompt = pending.prompt()
            # Raise errors for invalid grammars before computing anything.
            self._model.rules.matcher(options.sampling.grammar)
            return Answer(pending, self.prepare(prompt, options), self._model)
        except KeyboardInterrupt:  # An interrupt ends the whole batch.
            raise
        except BaseException as error:  # noqa: BLE001 -- reraised by the caller
            pending.fail(error)
            return None

    def prepare(self, prompt: BlockPrompt, options: GenerateOptions) -> Prepared:
        """Tokenize a prompt. In block mode, also fetch its blocks and set their positions."""
        if options.mode == "block":
            return self._prepare_blocks(prompt, options)
        ids = self._model.tokenizer.prompt_ids(prompt)
        limit = self._model.room_for(len(ids.flat), options.sampling)
        stats = ReuseStats("full", computed_tokens=len(ids.flat))
        return Prepared([*chain.from_iterable(ids.context)], ids.final, Context(()), limit, stats)

    def _prepare_blocks(self, prompt: BlockPrompt, options: GenerateOptions) -> Prepared:
        started = time.perf_counter()
        recipe = options.recipe
        blocks, final_ids = self._model.tokenizer.with_final_ids(prompt, recipe.promote)
        specs = self._fetcher.specs(blocks, as_prompt=True, recipe=recipe)
        prompt_tokens = sum(len(spec.ids) for spec in specs) + len(final_ids)
        # Raise an error before computing anything if the prompt does not fit.
        limit = self._model.room_for(prompt_tokens, options.sampling)
        fetched = self._fetcher.fetch(specs)
        context = place(fetched.blocks, recipe.positions)
        # Nothing precedes the first block, so recomputing it would change nothing.
        may_change = [
            spec.block.is_passage and index > 0 for index, spec in enumerate(specs) if spec.ids
        ]
        reused = fetched.reused_tokens
        stats = ReuseStats(
            "block",
            hits=fetched.hits,
            misses=fetched.misses,
            reused_tokens=reused,
            computed_tokens=prompt_tokens - reused,
            fetch_s=time.perf_counter() - started,
            int8_blocks=sum(kv.scales is not None for kv in fetched.blocks),
            recipe=str(recipe),
        )
        return Prepared(
            context.token_ids,
            final_ids,
            context,
            limit,
            stats,
            fetched.is_hit,
            may_change,
            tokens_to_recompute(context.lengths, may_change, recipe.recompute),
        )

    def _recomputed(self, prepared: Prepared, options: GenerateOptions) -> Prepared:
        """Recompute tokens for the question as the recipe requires, in a copy of the context. The
        caller must hold the model's lock."""
        if not prepared.recomputed_tokens:
            return prepared
        started = time.perf_counter()
        context, chosen = recompute(
            self._model,
            prepared.context,
            prepared.may_change,
            prepared.final_ids,
            options.recipe.recompute,
        )
        return prepared.recomputed(context, chosen, time.perf_counter() - started)

    def answer_logits(
        self, prompt: BlockPrompt, answer_ids: Sequence[int], options: GenerateOptions
    ) -> Tensor:
        self._model.check_unchanged()
        prepared = self.prepare(prompt, options)
        if prepared.limit < len(answer_ids):
            raise ContextOverflowError(
                f"Prompt and answer exceed the context window of {self._model.max_context_tokens} "
                f"tokens: there is room for {prepared.limit} of {len(answer_ids)} answer tokens"
            )
        with self._model.lock:
            prepared = self._recomputed(prepared, options)
        context_ids, final_ids, *_ = prepared
        cache = self._cache([prepared], len(final_ids) + len(answer_ids) - 1, options)
        return self._model.answer_logits(context_ids, final_ids, answer_ids, cache)

    # -- answering ---------------------------------------------------------------------------

    def _batches(self, answers: Sequence[Answer]) -> list[list[Answer]]:
        """Split requests into batches with equal token limits. A batch of several requests has at
        most ``BlockModel.batch_tokens`` tokens to compute, including padding: of final blocks, and
        of contexts in full mode or if the recipe recomputes tokens."""
        batches: list[list[Answer]] = []
        widest = 0
        for answer in sorted(answers, key=lambda answer: answer.prepared.limit):
            prepared = answer.prepared
            limit, width = prepared.limit, len(prepared.final_ids)
            if prepared.recomputed_tokens or not prepared.context.blocks:
                width += len(prepared.context_ids)
            widest = max(widest, width)
            if (
                not batches
                or batches[-1][0].prepared.limit != limit
                or widest * (len(batches[-1]) + 1) > self._model.batch_tokens
            ):
                batches.append([])
                widest = width
            batches[-1].append(answer)
        return batches

    def _answer(self, answers: Sequence[Answer]) -> None:
        """Answer requests in one batch. If it fails, retry those without streamed text singly."""
        try:
            for answer, ids in zip(answers, self._generate(answers), strict=True):
                answer.complete(ids)
            return
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 -- reraised by the callers
            failure = error
            traceback.clear_frames(error.__traceback__)  # The frames would keep the cache alive.
        for answer in answers:
            if len(answers) > 1 and answer.can_restart:
                answer.restart()
                self._answer([answer])
            else:
                answer.pending.fail(failure)

    def _generate(self, answers: Sequence[Answer]) -> list[list[int]]:
        options = answers[0].options

        def nobody_waits() -> bool:
            return all(answer.pending.left or answer.has_ended for answer in answers)

        with self._model.running(options.sampling):
            if nobody_waits():  # The callers may stop waiting while other requests use the model.
                raise CancelledError
            prompts = [self._recomputed(answer.prepared, options) for answer in answers]
            start = self._tails.begin(prompts[0], options) if len(prompts) == 1 else NOTHING
            for answer, prompt in zip(answers, prompts, strict=True):
                # Only keep the statistics: the answer would keep a recomputed context in memory.
                stats = prompt.after(start.tokens).stats
                answer.prepared = answer.prepared._replace(stats=stats)
            with _assembling(answers):
                longest = max(len(prompt.final_ids) for prompt in prompts)
                cache = self._cache(prompts, longest - start.tokens, options)
                if cache is None and start.base is not None:
                    cache = empty_cache(self._model.config)
                if cache is not None:
                    cache.append(start.states, start.tokens)
            rows = self._model.generate_batch(
                [(prompt.context_ids, prompt.final_ids) for prompt in prompts],
                options.sampling,
                cache=cache,
                on_tokens=lambda tokens: [  # A single answer is completed after its grammar check.
                    answer.push_row(token, completes=len(tokens) > 1)
                    for answer, token in zip(answers, tokens, strict=False)
                ],
                is_cancelled=nobody_waits,
                grammars=[answer.options.sampling.grammar for answer in answers],
                on_failure=None
                if len(answers) == 1
                else lambda place, error: answers[place].pending.fail(error),
            )
            if len(prompts) == 1:
                self._tails.keep(start, prompts[0], rows[0], cache)
            return rows

    def _cache(
        self, prompts: Sequence[Prepared], final_tokens: int, options: GenerateOptions
    ) -> Any:
        """Assemble a KV cache from prompts' contexts, for final blocks of up to ``final_tokens``.
        Returns None in full mode, and for prompts without context blocks (unless CUDA graphs run
        them), because the model then creates its own cache."""
        contexts = [prompt.context for prompt in prompts]
        if not any(context.blocks for context in contexts) and not (
            options.mode == "block"
            and self._model.graph_runner is not None
            and fills_in_order(self._model.hf_model, options.sampling)
        ):
            return None
        assembly = self._model.choose_assembly(self._assembly, final_tokens, contexts)
        return self._model.cache_for(*contexts, assembly=assembly)


@contextmanager
def _assembling(answers: Sequence[Answer]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    for answer in answers:
        answer.clock.assembling, answer.clock.prefilling = started, time.perf_counter()
