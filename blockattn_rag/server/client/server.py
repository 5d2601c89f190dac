"""Client-side view of a server: its description, its model, and requests to it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeVar

from blockattn_rag.engine.fetcher import OnMiss
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.pending import PendingAnswer
from blockattn_rag.engine.results import Generation
from blockattn_rag.errors import MissError, ServingError
from blockattn_rag.kv.block_kv import token_digest
from blockattn_rag.model.loading import load_tokenizer
from blockattn_rag.model.sampling import room_for
from blockattn_rag.prompts.blocks import IN_MEMORY, STORED, Block, BlockPrompt, Keep, keep_of
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.server.client.http import Client, PassingError, RefusedError, background
from blockattn_rag.server.client.ingest import outcome_lengths
from blockattn_rag.server.client.request import (
    ComingAnswer,
    Tokenised,
    TokenPrompt,
    completion_body,
)
from blockattn_rag.server.protocol import (
    COMPLETIONS,
    ENCODE,
    INFO,
    MOST_BLOCKS,
    BlockPlan,
    EncodeAnswer,
    EncodeBody,
    ServerInfo,
)

logger = logging.getLogger("blockattn_rag")

T = TypeVar("T")

_MOST_USED = 4096
_MOST_REMEMBERED = 4096
"""Maximum number of blocks whose token ids are cached, because passages recur."""


class RemoteModel:
    """A model behind a server. Only its tokenizer is loaded in this process.

    Args:
        given: Name of the model at the server; None for the server's first model.
        tokenizer: A transformers tokenizer, or its name or path; None for the model's name.
        ask_info: Function that fetches the server's description.
    """

    def __init__(
        self, given: str | None, tokenizer: Any, ask_info: Callable[[], ServerInfo]
    ) -> None:
        self.given = given
        self._given_tokenizer = tokenizer
        self._ask_info = ask_info
        self._lock = threading.Lock()
        self._block_tokenizer: BlockTokenizer | None = None

    @property
    def name(self) -> str:
        """Name of the model at the server."""
        return self.given or self._ask_info().models[0]

    @property
    def fingerprint(self) -> str:
        """Identity of the model, its tokenizer and the layout of its keys and values."""
        return self._ask_info().fingerprint

    @property
    def max_context_tokens(self) -> int:
        """Maximum number of tokens of a prompt and its answer together."""
        return self._ask_info().max_tokens

    @property
    def tokenizer(self) -> BlockTokenizer:
        """Tokenizer of the model. Fetches the model's name from the server if none was given."""
        if self._block_tokenizer is not None:
            return self._block_tokenizer
        is_named = self._given_tokenizer is not None or self.given is not None
        return self._load(self.given if is_named else self.name)

    def name_at(self, info: ServerInfo) -> str:
        """Name of the model at a server with this description."""
        return self.given or info.models[0]

    def check(self, info: ServerInfo) -> None:
        """Raise ServingError if a server does not have this model, or has another tokenizer."""
        if self.name_at(info) not in info.models:
            raise ServingError(
                f"the server has no model {self.given!r}; it has {', '.join(info.models)}"
            )
        tokenizer = self._load(self.name_at(info))
        if tokenizer.fingerprint != info.tokenizer:
            raise ServingError(
                f"the tokenizer ({tokenizer.fingerprint[:12]}) differs from the server's "
                f"({info.tokenizer[:12]}), so token ids would stand for other texts; pass the "
                "tokenizer of the served model as tokenizer="
            )

    def tokenise(self, prompt: BlockPrompt, promote: int) -> TokenPrompt:
        """Tokenize a prompt. Raises ValueError if it has no token."""
        context, final = self.tokenizer.with_final_ids(prompt, promote)
        tokenised = [self.tokenised(block, index == 0) for index, block in enumerate(context)]
        there = [place for place, one in enumerate(tokenised) if one.ids]
        return TokenPrompt([context[i] for i in there], [tokenised[i] for i in there], final)

    @cached_property
    def tokenised(self) -> Callable[[Block, bool], Tokenised]:
        """Function that tokenizes a block. Second argument: whether it opens its prompt and gets
        BOS."""
        tokenizer = self.tokenizer

        def tokenised(block: Block, first: bool) -> Tokenised:
            ids = tokenizer.block_ids(block, first=first)
            return Tokenised(ids, token_digest(ids))

        return lru_cache(_MOST_REMEMBERED)(tokenised)

    def _load(self, name: str | None) -> BlockTokenizer:
        with self._lock:
            if self._block_tokenizer is None:
                given = name if self._given_tokenizer is None else self._given_tokenizer
                self._block_tokenizer = self._made(given)
            return self._block_tokenizer

    def _made(self, given: Any) -> BlockTokenizer:
        if isinstance(given, BlockTokenizer):
            return given
        if not isinstance(given, (str, Path)):
            return BlockTokenizer(given)
        try:
            return BlockTokenizer(load_tokenizer(given))
        except (OSError, ValueError) as error:
            if self._given_tokenizer is not None:
                raise
            raise ServingError(
                f"cannot load a tokenizer named {str(given)!r}, the server's name for its model; "
                "pass the tokenizer's name or path as tokenizer="
            ) from error


class Server:
    """A server with this package's connector, and one of its models.

    Coroutines run in the event loop of ``background``.

    Args:
        model: Name of the model at the server; None for its first model.
        tokenizer: See ``RemoteModel``.
        recipe: Recipe that the server must have; None for any.
        on_miss: Whether the server may encode missing passages.
    """

    def __init__(
        self,
        client: Client,
        model: str | None,
        tokenizer: Any,
        recipe: RecipeOutline | None,
        on_miss: OnMiss = "compute",
    ) -> None:
        self.client = client
        self.model = RemoteModel(model, tokenizer, self.info_now)
        self._recipe = recipe
        self._on_miss = on_miss
        self._info: ServerInfo | None = None
        self._has_warned = False
        # Digests of blocks that were used once, and may be stored when they are used again.
        self._used: set[str] = set()

    def info_now(self) -> ServerInfo:
        """Blocking version of ``info``, for other threads."""
        return self._info or background.start(self.info()).result()

    async def info(self) -> ServerInfo:
        """Fetch the server's description, once and again after failures.

        Raises:
            ServingError: The server is unreachable or incompatible.
        """
        return await self._retried(self._checked_info)

    async def encode(self, body: EncodeBody) -> EncodeAnswer:
        """Encode blocks, or look them up."""

        async def ask() -> EncodeAnswer:
            # Blocks are always encoded by the base model.
            asked = {**body.to_dict(), "model": (await self._checked_info()).models[0]}
            return EncodeAnswer.from_dict(await self.client.post(ENCODE, asked))

        return await self._retried(ask)

    async def count_missing(self, body: EncodeBody) -> int:
        """Number of these blocks that are not stored."""
        look = replace(body, only_look=True)
        return len(outcome_lengths(look, await self.encode(look))["missing"])

    def check_recipe(self, recipe: RecipeOutline | None, info: ServerInfo) -> None:
        """Raise ValueError if the recipe differs from the server's. None matches any recipe."""
        wanted = recipe or self._recipe
        if wanted not in (None, info.recipe):
            raise ValueError(
                f"found recipe {wanted}, but {self.client.base_url} has the recipe {info.recipe}; "
                "use recipe='auto', or a server with that recipe"
            )

    async def answer(
        self, pending: PendingAnswer, options: GenerateOptions, recipe: RecipeOutline | None
    ) -> Generation:
        """Answer a prompt. ``recipe``: the recipe that the call requires, if any.

        Raises the same errors as ``RemoteEngine.generate``.
        """
        info = await self.info()
        self.check_recipe(recipe, info)
        prompt = await asyncio.to_thread(
            lambda: self.model.tokenise(pending.prompt(), info.promote)
        )
        limit = min(room_for(len(prompt.ids), info.max_tokens), options.sampling.max_new_tokens)
        if options.mode == "full" or not prompt.context:
            return await self._complete(pending, prompt, None, limit, options, info)
        if len(prompt.lengths) > MOST_BLOCKS:
            raise ValueError(
                f"found {len(prompt.lengths)} blocks in the prompt, expected at most {MOST_BLOCKS} "
                "for a server; retrieve fewer passages"
            )
        plan = BlockPlan("complete", prompt.lengths, keep=self._keep(prompt))
        self._warn_if_untuned(info)
        if self._on_miss == "error":
            await self._check_nothing_missing(prompt)
        return await self._complete(pending, prompt, plan, limit, options, info)

    def _keep(self, prompt: TokenPrompt) -> tuple[Keep, ...]:
        """Where the server may keep each block, with the rules of a local engine."""
        keeps = [keep_of(block.origin) for block in prompt.blocks]
        digests = [one.digest for one in prompt.context]
        again = [digest in self._used for digest in digests]
        if len(self._used) >= _MOST_USED:
            self._used.clear()
        self._used |= {one for one, keep in zip(digests, keeps, strict=True) if keep == IN_MEMORY}
        return tuple(
            STORED if keep == IN_MEMORY and used else keep
            for keep, used in zip(keeps, again, strict=True)
        )

    async def _complete(
        self,
        pending: PendingAnswer,
        prompt: TokenPrompt,
        plan: BlockPlan | None,
        limit: int,
        options: GenerateOptions,
        before: ServerInfo,
    ) -> Generation:
        """Request an answer. Failures before the first token are retried.

        Args:
            before: Description for which the prompt was split into blocks.
        """
        tokenizer = self.model.tokenizer.tokenizer
        has_begun = False

        async def ask() -> Generation:
            nonlocal has_begun
            info = await self._checked_info()
            if info.recipe != before.recipe:
                raise ServingError(
                    f"the recipe of {self.client.base_url} changed from {before.recipe} to "
                    f"{info.recipe} while a prompt was sent: ask again"
                )
            name, sampling = self.model.name_at(info), options.sampling
            body = completion_body(name, prompt.ids, plan, limit, sampling)
            how = options.mode, tokenizer, sampling, info.recipe
            answer = ComingAnswer(pending, prompt, plan, *how)
            async with aclosing(self.client.events(COMPLETIONS, body)) as events:
                async for event in events:
                    answer.take(event)
                    has_begun |= answer.has_begun
            return answer.complete()

        return await self._retried(ask, lambda: not has_begun)

    async def _check_nothing_missing(self, prompt: TokenPrompt) -> None:
        """Raise MissError if a passage of the prompt is not stored."""
        missing: list[Block] = []
        for at, (block, tokenised) in enumerate(zip(prompt.blocks, prompt.context, strict=True)):
            if keep_of(block.origin).is_stored:
                body = EncodeBody((tuple(tokenised.ids),), opens_prompt=at == 0)
                missing += [block] * await self.count_missing(body)
        if missing:
            raise MissError(
                f"{len(missing)} of {len(prompt.blocks)} blocks are not in the store and "
                f"on_miss='error'; the first is {missing[0].text[:60]!r}. Encode them first "
                "(engine.encode), or use on_miss='compute'."
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
                    "are not configured (docs/guides/serving_vllm.md)"
                ) from error
            await asyncio.to_thread(self.model.check, info)
            self._info = info
        return self._info

    async def _retried(
        self, ask: Callable[[], Awaitable[T]], may_retry: Callable[[], bool] = lambda: True
    ) -> T:
        """Like ``Client.retried``, but fetches the description again after a failure."""

        async def checked() -> T:
            try:
                return await ask()
            except PassingError:
                self._info = None
                raise

        return await self.client.retried(checked, may_retry)

    def _warn_if_untuned(self, info: ServerInfo) -> None:
        if info.block_tuned or info.adapter or self._has_warned:
            return
        self._has_warned = True
        logger.warning(
            "%s at %s is not known to be block-fine-tuned, and its recipe has no adapter, so its "
            "answers in block mode may be less accurate than in full mode; serve a recipe of "
            "`blockattn-rag repair`, or use mode='full' where that matters",
            self.model.name_at(info), self.client.base_url,
        )  # fmt: skip


def count_missing_now(server: Server, bodies: Sequence[EncodeBody]) -> int:
    """Blocking version of ``Server.count_missing`` for several bodies, for other threads."""
    return sum(background.start(server.count_missing(body)).result() for body in bodies)
