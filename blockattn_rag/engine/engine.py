"""BlockAttentionEngine: a model and a KV store, for adapters and the command line."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockattn_rag.engine.fetcher import BlockFetcher, OnMiss
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike, resolve_recipe
from blockattn_rag.engine.ingest import EncodeStats, precompute
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.pending import MAX_BATCH, Group, PendingRequest
from blockattn_rag.engine.prefetch import Prefetcher, PrefetchStats
from blockattn_rag.engine.protocol import LatePrompt, Prompt, blocks_to_encode, made
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation, GenerationChunk, Mode
from blockattn_rag.engine.runner import Runner
from blockattn_rag.engine.scheduler import scheduler_of
from blockattn_rag.engine.tails import SHARE
from blockattn_rag.kv.context import Assembly, Positions
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.store import DEFAULT_RESIDENT_BYTES, KVStore, open_store
from blockattn_rag.store.namespaces import Access

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class BlockAttentionEngine:
    """Answers prompts made of blocks, reusing every block's keys and values.

    Thread-safe. A model runs one request or batch at a time, for all engines over it.

    Args:
        model: The model.
        store: Where KV is stored: a store, the path of a ``DirectoryStore``, or None for memory.
        recipe: How the model runs in block mode: ``"auto"``, ``"none"``, the folder of a recipe,
            a ``Recipe``, or a sink alone such as ``"head:4"``. ``"auto"`` takes the best recipe
            known; see ``find_recipe.resolve_recipe``.
        resident_bytes: Bytes of stored blocks to keep on the model's device. 0 reads and checks
            blocks for every answer. In addition, up to a quarter as many bytes hold what recent
            answers computed after their contexts, for their conversations' next turns
            (``engine.tails``).
        kv_dtype: Type to keep computed keys and values in: ``"model"``, or ``"int8"`` for half or a
            quarter of the bytes (``kv.quantization``). Stored blocks are read in either type.
        namespace: Isolates tenants: blocks stored under one namespace are invisible to others.
            Empty: the default namespace.
        read_namespaces: Further namespaces to read, in this order, such as ``("public",)`` for
            collections that tenants share. They are never written.
        read_only: Store nothing. Missing blocks are computed and kept in memory within
            ``resident_bytes``. The store may still record that an entry was used.
        folder: Folder of the database that the store belongs to. ``recipe="auto"`` looks there
            first.
        positions: Overrides the recipe's positions, for experts.
        on_miss: ``"compute"`` encodes and stores a block that is not in the store. ``"error"``
            raises ``MissError``, for benchmarks.
        assembly: ``"relay"`` attends to blocks where they are stored, ``"copy"`` joins them in new
            tensors. ``"auto"`` uses relay where the model allows it.

    Raises:
        ValueError: the recipe does not belong to the model, or an argument is out of range.
        UnsupportedModelError: the model does not support ``assembly="relay"``.
    """

    def __init__(
        self,
        model: BlockModel,
        store: KVStore | str | Path | None = None,
        *,
        recipe: RecipeLike = AUTO,
        resident_bytes: int = DEFAULT_RESIDENT_BYTES,
        kv_dtype: KVDtype = "model",
        namespace: str = "",
        read_namespaces: Sequence[str] = (),
        read_only: bool = False,
        folder: str | Path | None = None,
        positions: Positions | None = None,
        on_miss: OnMiss = "compute",
        assembly: Assembly = "auto",
    ) -> None:
        access = Access(namespace, read_namespaces, read_only)
        self._model = model
        self.store = open_store(store)
        self._folder = None if folder is None else Path(folder).expanduser()
        self._positions = positions
        self._recipe = self._resolved(recipe)
        self._fetcher = BlockFetcher(model, self.store, resident_bytes, access, kv_dtype, on_miss)
        self._prefetcher = Prefetcher()
        self._scheduler = scheduler_of(model.lock)
        self._runner = Runner(model, self._fetcher, assembly, resident_bytes // SHARE)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Any = None,
        store: KVStore | str | Path | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        recipe: RecipeLike = AUTO,
        resident_bytes: int = DEFAULT_RESIDENT_BYTES,
        kv_dtype: KVDtype = "model",
        namespace: str = "",
        read_namespaces: Sequence[str] = (),
        read_only: bool = False,
        folder: str | Path | None = None,
        positions: Positions | None = None,
        on_miss: OnMiss = "compute",
        assembly: Assembly = "auto",
        **model_kwargs: Any,
    ) -> BlockAttentionEngine:
        """Load a model and open a store.

        ``model`` is a path, a hub id, ``"bundled"``, or a loaded model with its ``tokenizer``.
        """
        loaded = BlockModel.from_pretrained(
            model, tokenizer=tokenizer, device=device, dtype=dtype, **model_kwargs
        )
        return cls(
            loaded,
            store,
            recipe=recipe,
            resident_bytes=resident_bytes,
            kv_dtype=kv_dtype,
            namespace=namespace,
            read_namespaces=read_namespaces,
            read_only=read_only,
            folder=folder,
            positions=positions,
            on_miss=on_miss,
            assembly=assembly,
        )

    @property
    def model(self) -> BlockModel:
        """The model. Another model needs another engine."""
        return self._model

    @property
    def kv_dtype(self) -> KVDtype:
        """The type that computed blocks are kept in."""
        return self._fetcher.kv_dtype

    @property
    def access(self) -> Access:
        """The namespaces of the store that are read and written."""
        return self._fetcher.access

    @property
    def recipe(self) -> Recipe:
        """How the model runs in block mode."""
        return self._recipe

    # -- ingestion ---------------------------------------------------------------------------

    def encode(
        self,
        texts: Sequence[str | Block] | BlockPrompt,
        *,
        show_progress: bool = False,
        recipe: RecipeLike | None = None,
    ) -> list[str]:
        """Compute and store the KV of texts that are not stored yet.

        Args:
            texts: Passages, or a ``BlockPrompt`` whose context is encoded. Its first block has the
                BOS token, so it is stored separately from the same text as a passage.
            show_progress: Whether to show a progress bar.
            recipe: Overrides the engine's recipe.

        Returns:
            The handles, in order.
        """
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
        """``encode`` that returns figures; see ``ingest.precompute`` for the arguments."""
        return precompute(
            self._fetcher,
            blocks,
            run=self._scheduler.run,
            as_prompt=as_prompt,
            show_progress=show_progress,
            on_progress=on_progress,
            batch_tokens=batch_tokens,
            recipe=self._recipe_of_call(recipe),
        )

    def prefetch(
        self, passages: Sequence[str | Block], *, recipe: RecipeLike | None = None
    ) -> None:
        """Start reading passages from the store before their prompt exists.

        Returns at once and raises nothing; ``prefetches`` has the counts. Passages stay in memory
        until ``resident_bytes`` are full, so pass the likeliest first. Nothing is computed.

        Args:
            passages: The passages.
            recipe: Overrides the engine's recipe.
        """
        given = [passages] if isinstance(passages, str) else list(passages)
        self._prefetcher.submit(len(given), partial(self._prefetch, given, recipe))

    @property
    def prefetches(self) -> PrefetchStats:
        """Figures of ``prefetch`` so far."""
        return self._prefetcher.stats

    def contains(self, block: Block, *, first: bool = False) -> bool:
        """Whether a block's KV is stored. ``first``: as the first block of a prompt."""
        return self._fetcher.contains(block, first=first, recipe=self._recipe)

    # -- answering ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        mode: Mode = "block",
        recipe: RecipeLike | None = None,
        max_new_tokens: int = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        **generate_kwargs: Any,
    ) -> Generation:
        """Answer a prompt.

        Args:
            prompt: A ``BlockPrompt``, or a list whose last item is the final block.
            mode: ``"block"`` reuses blocks; ``"full"`` is ordinary attention over the same tokens.
            recipe: Overrides the engine's recipe, for comparisons. Pass a ``Recipe``: a folder is
                read in every call.
            max_new_tokens: Maximum number of tokens. The context window may end the answer earlier.
            temperature: 0 or None is greedy. ``top_p`` and ``top_k`` apply above 0.
            top_p: Nucleus sampling.
            top_k: Number of likeliest tokens to sample from.
            stop: Strings that end the answer. They are not part of it.
            seed: Makes sampling repeatable.
            generate_kwargs: ``response_format``, ``structured_outputs``, and arguments of
                transformers' ``generate``.

        Raises:
            ContextOverflowError: the prompt does not fit in the model's context window.
            MissError: a block is not stored and the engine has ``on_miss="error"``.
        """
        options = {
            "mode": mode,
            "recipe": recipe,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "stop": stop,
            "seed": seed,
        }
        pending = self._pending(prompt, options | generate_kwargs)
        return self._scheduler.submit_and_wait(pending)[0]

    def submit(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> PendingRequest:
        """Request an answer without waiting for it.

        Args:
            prompt: A prompt, or a function that makes it on the model's thread.
            group: Calls whose requests are answered in one batch.
            options: As for ``generate``.

        Returns:
            The pending request. ``result(timeout)`` waits for its answer, ``leave()`` cancels it.
        """
        pending = self._pending(prompt, options, group=group)
        self._scheduler.submit(pending)
        return pending

    async def agenerate(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> Generation:
        """``generate`` for event loops. Calls of the same turn of the loop share a batch.

        Cancelling the task ends the generation. See ``submit`` for ``prompt`` and ``group``.
        """
        pending = self._pending(prompt, options, group=group)
        self._scheduler.submit_in_turn(pending)
        return await pending.wait()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[GenerationChunk, None, None]:
        """Answer a prompt piece by piece. ``options`` are those of ``generate``.

        The last chunk has the complete ``Generation``. Closing the iterator ends the generation and
        frees the model.
        """
        pending = self._pending(prompt, options)
        return pending.chunks(partial(self._scheduler.submit, pending))

    def astream(self, prompt: LatePrompt, **options: Any) -> AsyncGenerator[GenerationChunk, None]:
        """``stream`` for event loops."""
        pending = self._pending(prompt, options)
        return pending.achunks(partial(self._scheduler.submit_in_turn, pending))

    def generate_batch(
        self, prompts: Sequence[Prompt], *, batch_size: int = MAX_BATCH, **options: Any
    ) -> list[Generation]:
        """Answer several prompts, in order. ``options`` are those of ``generate``.

        Up to ``batch_size`` prompts share each forward where that gives ``generate``'s answers.
        Models with sliding windows, seeded sampling, and options that look back at the prompt
        (beams, penalties) are answered one by one. Batches are smaller for prompts with more tokens
        to compute than ``BlockModel.batch_tokens``.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number from 1 on, found {batch_size!r}")
        options["recipe"] = self._recipe_of_call(options.get("recipe"))  # once for all prompts
        waiting = [self._pending(prompt, options, max_batch=batch_size) for prompt in prompts]
        return self._scheduler.submit_and_wait(*waiting)

    def answer_logits(
        self,
        prompt: Prompt,
        answer_ids: Sequence[int],
        *,
        mode: Mode = "block",
        **options: Any,
    ) -> torch.Tensor:
        """The model's logits at each token of a given answer (teacher forcing).

        Args:
            prompt: As for ``generate``.
            answer_ids: Token ids of an answer, at least one.
            mode: As for ``generate``.
            options: As for ``generate``.

        Returns:
            Logits ``[answer tokens, vocab]`` in the model's dtype, on its device. The first row
            predicts the answer's first token.

        Raises as ``generate``.
        """
        if not answer_ids:
            raise ValueError("the answer has no token to predict")
        parsed = self._options({**options, "mode": mode, "max_new_tokens": len(answer_ids)})
        answer_logits = self._runner.answer_logits
        return self._scheduler.run(partial(answer_logits, made(prompt), answer_ids, parsed))

    def answer_batch(self, requests: Sequence[PendingRequest]) -> None:
        """Answer requests with equal options. Called by the scheduler, on the model's thread."""
        self._runner.answer_batch(requests)

    # -- inside ------------------------------------------------------------------------------

    def _prefetch(
        self, passages: Sequence[str | Block], recipe: RecipeLike | None
    ) -> PrefetchStats:
        blocks = [one if isinstance(one, Block) else Block(one) for one in passages if one != ""]
        return self._fetcher.prefetch(blocks, recipe=self._recipe_of_call(recipe))

    def _pending(
        self, prompt: LatePrompt, options: Mapping[str, Any], **scheduling: Any
    ) -> PendingRequest:
        parsed = self._options(options)
        if not callable(prompt):  # an invalid prompt is refused now, not when its turn comes
            prompt = made(prompt)
        return PendingRequest(
            partial(made, prompt),
            parsed,
            self.answer_batch,
            can_share=partial(self.model.batches_exactly, parsed.sampling),
            needs=self.model.rules.start(parsed.sampling.grammar),
            **scheduling,
        )

    def _options(self, given: Mapping[str, Any]) -> GenerateOptions:
        return GenerateOptions.parse(given, self._recipe_of_call(given.get("recipe")))

    def _recipe_of_call(self, given: RecipeLike | None) -> Recipe:
        if given is None or given is self._recipe or given == AUTO:
            return self._recipe
        return self._resolved(given)

    def _resolved(self, given: RecipeLike) -> Recipe:
        found = resolve_recipe(given, self._model, self.store, self._folder)
        return found.with_positions(self._positions)
