"""What one server is asked, and what it must be."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import PendingAnswer
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation
from blockattn_rag.errors import ContextOverflowError, MissError, ServingError
from blockattn_rag.prompts.blocks import Block, Keep, keep_of
from blockattn_rag.server.client.answer import ComingAnswer
from blockattn_rag.server.client.background import background
from blockattn_rag.server.client.client import Client, PassingError, RefusedError
from blockattn_rag.server.client.ingest import outcome_lengths
from blockattn_rag.server.client.model import RemoteModel
from blockattn_rag.server.client.request import TokenPrompt, completion_body
from blockattn_rag.server.endpoint import (
    COMPLETIONS,
    ENCODE,
    INFO,
    EncodeAnswer,
    EncodeBody,
    ServerInfo,
)
from blockattn_rag.server.protocol import BlockPlan

logger = logging.getLogger("blockattn_rag")

T = TypeVar("T")

_MOST_USED = 4096


class Server:
    """A server with this package's connector, asked for one of its models.

    Coroutines run in the event loop of ``background``.

    Args:
        client: reaches it.
        model: the name by which it knows the model; None for its first.
        tokenizer: see ``RemoteModel``.
        sink: after which it must encode passages; None: whichever it has.
    """

    def __init__(self, client: Client, model: str | None, tokenizer: Any, sink: str | None) -> None:
        self.client = client
        self.model = RemoteModel(model, tokenizer, self.info_now)
        self._sink = sink
        self._info: ServerInfo | None = None
        self._has_warned = False
        # Digests of system messages that may be stored when they come again.
        self._used: set[str] = set()

    def info_now(self) -> ServerInfo:
        """``info``, for other threads, which wait for it."""
        return self._info or background.start(self.info()).result()

    async def info(self) -> ServerInfo:
        """What the server tells of itself; asked for by the first call, and again after failures,
        because it may be another one by then.

        Raises:
            ServingError: it cannot be reached, or is not as it must be.
        """
        return await self._retried(self._checked_info)

    async def encode(self, body: EncodeBody) -> EncodeAnswer:
        """Have blocks encoded, or looked for."""

        async def ask() -> EncodeAnswer:
            # By the base model, whichever model is to answer.
            told = {**body.to_dict(), "model": (await self._checked_info()).models[0]}
            return EncodeAnswer.from_dict(await self.client.post(ENCODE, told))

        return await self._retried(ask)

    async def count_missing(self, body: EncodeBody) -> int:
        """How many of these blocks are not stored."""
        look = replace(body, only_look=True)
        return len(outcome_lengths(look, await self.encode(look))["missing"])

    def check_sink(self, sink: str | None, info: ServerInfo) -> None:
        """Refuse, by a ValueError, a sink that is not the server's; None is any."""
        wanted = sink or self._sink
        if wanted not in (None, info.sink):
            raise ValueError(
                f"found sink={wanted!r}, but {self.client.base_url} encodes passages with "
                f"sink={info.sink!r}; leave it out, or ask a server with that sink"
            )

    async def answer(
        self, pending: PendingAnswer, options: GenerateOptions, sink: str | None
    ) -> Generation:
        """The answer to a prompt; ``sink`` is the one that the call gave.

        Raises as ``RemoteEngine.generate``.
        """
        info = await self.info()
        self.check_sink(sink, info)
        prompt = await asyncio.to_thread(lambda: self.model.tokenise(pending.prompt()))
        limit = min(room_for(len(prompt.ids), info), options.sampling.max_new_tokens)
        if options.mode == "full" or not prompt.context:
            return await self._complete(pending, prompt, None, limit, options)
        plan = BlockPlan("complete", prompt.lengths, keep=self._keep(prompt))
        self._warn_if_untuned(info)
        if options.on_miss == "error":
            await self._check_nothing_missing(prompt)
        return await self._complete(pending, prompt, plan, limit, options)

    def _keep(self, prompt: TokenPrompt) -> tuple[Keep, ...]:
        """What the server may do with the blocks of a prompt: as an engine of this process."""
        keeps = [keep_of(block.origin) for block in prompt.blocks]
        digests = [one.digest for one in prompt.context]
        again = [digest in self._used for digest in digests]
        if len(self._used) >= _MOST_USED:
            self._used.clear()
        self._used |= {one for one, keep in zip(digests, keeps, strict=True) if keep == "memory"}
        return tuple(
            "store" if keep == "memory" and used else keep
            for keep, used in zip(keeps, again, strict=True)
        )

    async def _complete(
        self,
        pending: PendingAnswer,
        prompt: TokenPrompt,
        plan: BlockPlan | None,
        limit: int,
        options: GenerateOptions,
    ) -> Generation:
        """The server's answer; asked for once more if it failed before the first token."""
        tokenizer = self.model.tokenizer.tokenizer
        has_begun = False

        async def ask() -> Generation:
            nonlocal has_begun
            info = await self._checked_info()
            name, recipe = self.model.name_at(info), str(Recipe(info.sink))
            body = completion_body(name, prompt.ids, plan, limit, options.sampling)
            how = options.mode, tokenizer, options.sampling, recipe
            answer = ComingAnswer(pending, prompt, *how)
            async with aclosing(self.client.events(COMPLETIONS, body)) as events:
                async for event in events:
                    answer.take(event)
                    has_begun |= answer.has_begun
            return answer.complete()

        return await self._retried(ask, lambda: not has_begun)

    async def _check_nothing_missing(self, prompt: TokenPrompt) -> None:
        """Refuse, by a MissError, a prompt with passages that are not stored."""
        missing: list[Block] = []
        for at, (block, tokenised) in enumerate(zip(prompt.blocks, prompt.context, strict=True)):
            if keep_of(block.origin) == "store":
                body = EncodeBody((tuple(tokenised.ids),), opens_prompt=at == 0)
                missing += [block] * await self.count_missing(body)
        if missing:
            raise MissError(
                f"{len(missing)} of {len(prompt.blocks)} blocks are not in the store and "
                f"on_miss='error'; the first is {missing[0].text[:60]!r}. Encode them before "
                "(engine.encode), or use on_miss='compute'"
            )

    async def _checked_info(self) -> ServerInfo:
        if self._info is None:
            try:
                info = ServerInfo.from_dict(await self.client.get(INFO))
            except RefusedError as error:
                if error.status != 404:
                    raise
                raise ServingError(
                    f"{self.client.base_url} has no {INFO}: this package's connector and endpoint "
                    "are not configured there (docs/guides/serving_vllm.md)"
                ) from error
            await asyncio.to_thread(self.model.check, info)
            self._info = info
        return self._info

    async def _retried(
        self, ask: Callable[[], Awaitable[T]], may_retry: Callable[[], bool] = lambda: True
    ) -> T:
        """``Client.retried``; after a failure, another server may be at this address."""

        async def checked() -> T:
            try:
                return await ask()
            except PassingError:
                self._info = None
                raise

        return await self.client.retried(checked, may_retry)

    def _warn_if_untuned(self, info: ServerInfo) -> None:
        if info.block_tuned or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s at %s is not known to be block-fine-tuned: in block mode its answers will be less "
            "accurate than in full mode. Use mode='full' "
            "where that matters.",
            self.model.name_at(info), self.client.base_url,
        )  # fmt: skip


def room_for(tokens: int, info: ServerInfo) -> int:
    """How many tokens may be generated after so many.

    Raises:
        ContextOverflowError: none.
    """
    room = info.max_tokens - tokens
    if room < 1:
        raise ContextOverflowError(
            f"the prompt has {tokens} tokens, but the model holds at most {info.max_tokens}, the "
            "answer included; retrieve fewer or shorter passages"
        )
    return room


def count_missing_now(server: Server, bodies: Sequence[EncodeBody]) -> int:
    """``Server.count_missing`` of several bodies, for other threads."""
    return sum(background.start(server.count_missing(body)).result() for body in bodies)
