"""RemoteEngine: a model behind a server, with the interface of a local engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

from blockattn_rag.engine.fetcher import OnMiss, check_on_miss
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.engine.pending import (
    MAX_BATCH,
    Group,
    LatePrompt,
    PendingAnswer,
    Prompt,
    check_batch_size,
    to_block_prompt,
)
from blockattn_rag.engine.protocol import blocks_to_encode
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.model.sampling import room_for
from blockattn_rag.prompts.blocks import Block, BlockPrompt, keep_of
from blockattn_rag.prompts.recognition import entries_of, to_hex
from blockattn_rag.server.client.http import API_KEY_VARIABLE, Client, background
from blockattn_rag.server.client.ingest import ToEncode, batches, precompute
from blockattn_rag.server.client.request import check_possible, recipe_asked
from blockattn_rag.server.client.server import RemoteModel, Server, count_missing_now
from blockattn_rag.server.protocol import ServerInfo


class RemoteEngine:
    """Engine for a model behind a server, such as ``vllm serve`` with this package's connector.

    The server computes and stores blocks. Only the tokenizer is loaded in this process. The first
    call fetches the server's description, and raises if the server lacks the connector or has
    another tokenizer. Safe to use from many threads and event loops.

    Args:
        base_url: Address of the server, such as ``"http://gpu:8000"``, with or without ``/v1``.
        model: Name of the model at the server. Default: the server's first model.
        tokenizer: A transformers tokenizer, or its name or path. Default: that of ``model``.
        api_key: API key of the server. Default: the environment variable
            ``BLOCKATTN_RAG_API_KEY``.
        on_miss: ``"compute"``: the server encodes and stores missing passages. ``"error"``: they
            raise ``MissError``.
        recipe: ``"auto"`` for the server's recipe. Any other recipe must be equal to it.
        timeout_s: Seconds to wait for the next byte of an answer.
        retries: Maximum number of retries after temporary failures, until the first token of an
            answer.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        tokenizer: Any = None,
        *,
        api_key: str | None = None,
        on_miss: OnMiss = "compute",
        recipe: RecipeLike = AUTO,
        timeout_s: float = 600.0,
        retries: int = 1,
    ) -> None:
        if not (isinstance(retries, int) and retries >= 0):
            raise ValueError(f"retries must be an integer of at least 0, found {retries!r}")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, found {timeout_s!r}")
        api_key = api_key or os.environ.get(API_KEY_VARIABLE)
        client = Client(base_url, api_key, timeout_s, retries)
        self._server = Server(
            client, model, tokenizer, recipe_asked(recipe), check_on_miss(on_miss)
        )

    def __repr__(self) -> str:
        return f"RemoteEngine({self.base_url!r}, {self.model.given!r})"

    @property
    def model(self) -> RemoteModel:
        """Name, tokenizer and limits of the server's model."""
        return self._server.model

    @property
    def recipe(self) -> RecipeOutline:
        """The server's recipe."""
        return self.info.recipe

    @property
    def base_url(self) -> str:
        """The server's address, without ``/v1``."""
        return self._server.client.base_url

    @property
    def info(self) -> ServerInfo:
        """The server's description, fetched at the first call.

        Raises:
            ServingError: The server is unreachable or incompatible.
        """
        return self._server.info_now()

    # -- ingestion ---------------------------------------------------------------------------

    def encode(
        self,
        texts: Sequence[str | Block] | BlockPrompt,
        *,
        show_progress: bool = False,
        recipe: RecipeLike | None = None,
    ) -> list[str]:
        """Encode texts into the server's store, like ``BlockAttentionEngine.encode``."""
        blocks, as_prompt = blocks_to_encode(texts)
        self.precompute(blocks, as_prompt=as_prompt, show_progress=show_progress, recipe=recipe)
        return [block.handle for block in blocks]

    def precompute(
        self,
        blocks: Sequence[Block],
        *,
        as_prompt: bool = False,
        show_progress: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        batch_tokens: int | None = None,
        recipe: RecipeLike | None = None,
    ) -> EncodeStats:
        """Encode blocks like ``BlockAttentionEngine.precompute``, with concurrent requests of up to
        ``batch_tokens`` tokens.

        Raises:
            ContextOverflowError: A block is longer than the model's context window.
            ValueError: Blocks are missing, and the server is read-only.
            ServingError: A request failed. Blocks of earlier requests are stored.
        """
        asked = recipe_asked(recipe)
        info = self.info
        self._server.check_recipe(asked, info)
        wanted = [self._to_encode(one, as_prompt and not at) for at, one in enumerate(blocks)]
        opens_prompt = as_prompt and bool(wanted and wanted[0].ids)
        wanted = [one for one in wanted if one.ids]
        for one in wanted:
            room_for(len(one.ids), info.max_tokens)
        bodies = [*batches(wanted, as_prompt=opens_prompt, batch_tokens=batch_tokens)]
        if info.read_only and (absent := count_missing_now(self._server, bodies)):
            raise ValueError(
                f"{absent} of {sum(len(body.blocks) for body in bodies)} blocks are not in the "
                f"store, and {self.base_url} is read-only; encode them with a writable server"
            )
        if info.read_only:
            return EncodeStats(reused=sum(len(body.blocks) for body in bodies))
        encode = self._server.encode
        return precompute(encode, bodies, show_progress=show_progress, on_progress=on_progress)

    def contains(self, block: Block, *, first: bool = False) -> bool:
        """Whether a block is stored. ``first``: Look for it as the first block of a prompt."""
        wanted = [one for one in [self._to_encode(block, first)] if one.ids]
        bodies = [*batches(wanted, as_prompt=first, batch_tokens=None)]
        return bool(bodies) and not count_missing_now(self._server, bodies)

    # -- answering ---------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Answer a prompt, with the options of ``BlockAttentionEngine.generate``.

        ``recipe`` must match the server's. Other options of transformers' ``generate`` are accepted
        if vLLM has them, as are vLLM's ``response_format`` and ``structured_outputs``.

        Raises:
            ContextOverflowError: The prompt does not fit in the model's context window.
            MissError: A passage is not stored, and ``on_miss`` is ``"error"`` or the server is
                read-only.
            ServingError: The server rejects the request, fails, or answers in another mode.
            ValueError: An option is out of range or not supported.
        """
        return self.submit(prompt, **options).result()

    def submit(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> PendingAnswer:
        """Start an answer without waiting for it. ``options``: those of ``generate``.

        Args:
            prompt: A prompt, or a function that makes it in another thread.
            group: Ignored, because the server batches all requests.
        """
        pending, start = self._pending(prompt, options)
        start()
        return pending

    async def agenerate(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> Generation:
        """Asynchronous ``generate``. Cancelling the task stops the generation."""
        return await self.submit(prompt, group=group, **options).wait()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[GenerationChunk, None, None]:
        """Stream an answer. ``options``: those of ``generate``.

        The last chunk has the complete ``Generation``. Closing the iterator stops the generation.
        """
        pending, start = self._pending(prompt, options)
        return pending.chunks(start)

    def astream(self, prompt: LatePrompt, **options: Any) -> AsyncGenerator[GenerationChunk, None]:
        """Asynchronous ``stream``."""
        pending, start = self._pending(prompt, options)
        return pending.achunks(start)

    def generate_batch(
        self, prompts: Sequence[Prompt], *, batch_size: int = MAX_BATCH, **options: Any
    ) -> list[Generation]:
        """Answer several prompts, in order. ``options``: those of ``generate``.

        ``batch_size`` requests run at a time. After an error, the remaining ones are dropped.
        """
        check_batch_size(batch_size)
        gate = asyncio.Semaphore(batch_size)
        waiting = [self._pending(prompt, options, gate) for prompt in prompts]
        try:
            for _, start in waiting:
                start()
            return [pending.result() for pending, _ in waiting]
        finally:
            # After an error or an interrupt, this cancels the requests that have not finished.
            for pending, _ in waiting:
                pending.leave()

    # -- inside ------------------------------------------------------------------------------

    def _to_encode(self, block: Block, first: bool) -> ToEncode:
        keep = keep_of(block.origin, on_purpose=True)
        is_passage = block.origin == "passage" and not first
        entry = "".join(to_hex(entries_of([block.text]))) if is_passage else ""
        return ToEncode(self.model.tokenised(block, first).ids, keep.is_private, entry)

    def _pending(
        self, prompt: LatePrompt, given: Mapping[str, Any], gate: asyncio.Semaphore | None = None
    ) -> tuple[PendingAnswer, Callable[[], None]]:
        """Create a validated request, and a function that starts it."""
        recipe = recipe_asked(given.get("recipe"))
        options = GenerateOptions.parse(given, Recipe())
        check_possible(options)
        if not callable(prompt):  # an invalid prompt raises now
            prompt = to_block_prompt(prompt)
        pending = PendingAnswer(prompt)
        return pending, partial(self._start, pending, options, recipe, gate)

    def _start(
        self,
        pending: PendingAnswer,
        options: GenerateOptions,
        recipe: RecipeOutline | None,
        gate: asyncio.Semaphore | None,
    ) -> None:
        async def answer() -> Generation:
            async with gate or nullcontext():
                return await self._server.answer(pending, options, recipe)

        work = background.start(answer())
        pending.answer.add_done_callback(lambda _: work.cancel())  # if the caller has left
        work.add_done_callback(partial(_hand_over, pending))


def _hand_over(pending: PendingAnswer, work: Future[Generation]) -> None:
    """Complete a request with the result of its coroutine, unless the caller has left."""
    if work.cancelled() or not pending.begin():
        pending.leave()
    elif error := work.exception():
        pending.fail(error)
    else:
        pending.answer.set_result(work.result())
