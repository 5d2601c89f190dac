"""BlockAttentionEngine: answers prompts with a model and a KV store."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockattn_rag.engine.fetcher import BlockFetcher, OnMiss
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike, resolve_recipe
from blockattn_rag.engine.ingest import EncodeStats, blocks_to_encode, precompute
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.outline import STOCK
from blockattn_rag.engine.pending import (
    MAX_BATCH,
    Group,
    LatePrompt,
    PendingRequest,
    Prompt,
    to_block_prompt,
)
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
from blockattn_rag.store.passage_index import PassageIndex

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class BlockAttentionEngine:
    """Engine that answers prompts made of blocks, and reuses the context blocks' keys and values.

    Thread-safe. Engines can share a model, which runs one request or batch at a time.

    Args:
        model: A loaded model. To load it by path or hub id, use ``from_pretrained``.
        store: KV store, or its path or address (``open_store``). Default: 1 GiB in memory.
        recipe: How the model runs in block mode: ``"auto"``, settings such as ``"none"``,
            ``"fast"`` or ``"head+recompute:0.1"``, a ``Recipe``, or a recipe's folder. ``"auto"``
            uses the settings that the model was block-fine-tuned with, a recipe found for it, or
            ``stock`` (docs/guides/stock_models.md).
        resident_bytes: Maximum bytes of blocks to cache on the model's device. Default: 1 GiB. With
            0, each answer reads its blocks from the store. Up to a quarter of this size is used in
            addition for final blocks and answers, for the next chat turn (``engine.tails``).
        kv_dtype: Dtype of new keys and values: ``"model"``, or ``"int8"``, about half the size of
            16-bit and a quarter of float32 (``kv.quantization``). Blocks of both can be read.
        namespace: Isolates tenants: blocks stored under one namespace are invisible to others,
            unless they list it in ``read_namespaces``. Empty: the default namespace.
        read_namespaces: Other namespaces to read from, in order, such as ``("public",)`` for
            passages that tenants share. They are never written to.
        read_only: Whether to only read from the store. Answers compute missing blocks, and cache
            them within ``resident_bytes``; ``encode`` raises ``ValueError`` if a block is missing.
            The store may still record that an entry was used.
        folder: Folder of the database that the store belongs to; ``"auto"`` searches it first.
        stock: Settings that ``recipe="auto"`` uses for a stock model without a recipe.
        positions: Override for the recipe's ``positions``: ``"reordered"`` or ``"composite"``.
        on_miss: ``"compute"`` encodes and stores passages that are not in the store. ``"error"``
            raises ``MissError`` instead, for benchmarks.
        assembly: ``"relay"`` attends to blocks in place. ``"copy"`` concatenates them in new
            tensors. ``"auto"`` chooses for each batch: relay where it is faster and supported.

    Raises:
        ValueError: The recipe is damaged or of another model, or an argument is invalid.
        UnsupportedModelError: The model does not support the recipe, or ``assembly="relay"``.
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
        stock: str = STOCK,
        positions: Positions | None = None,
        on_miss: OnMiss = "compute",
        assembly: Assembly = "auto",
    ) -> None:
        access = Access(namespace, read_namespaces, read_only)
        self._model = model
        self.store = open_store(store)
        database = None if folder is None else Path(folder).expanduser()
        self._resolve = partial(
            resolve_recipe, model=model, store=self.store, folder=database, stock=stock
        )
        self._positions = positions
        self._recipe = self._resolved(recipe)
        self._fetcher = BlockFetcher(model, self.store, resident_bytes, access, kv_dtype, on_miss)
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
        stock: str = STOCK,
        positions: Positions | None = None,
        on_miss: OnMiss = "compute",
        assembly: Assembly = "auto",
        **model_kwargs: Any,
    ) -> BlockAttentionEngine:
        """Load a model, and create an engine with it.

        ``model`` is a path, a hub id, ``"bundled"``, or a loaded model with its ``tokenizer``.
        ``device``, ``dtype`` and ``model_kwargs`` are those of ``BlockModel.from_pretrained``. All
        other arguments are those of the class.
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
            stock=stock,
            positions=positions,
            on_miss=on_miss,
            assembly=assembly,
        )

    @property
    def model(self) -> BlockModel:
        """The engine's model. To use another model, create another engine."""
        return self._model

    @property
    def kv_dtype(self) -> KVDtype:
        return self._fetcher.kv_dtype

    @property
    def access(self) -> Access:
        """The store namespaces that the engine reads and writes."""
        return self._fetcher.access

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    @property
    def passages(self) -> PassageIndex:
        """Index of encoded passages, used to recognize them in prompts without markers.

        Raises:
            ValueError: The store does not support an index.
        """
        return self._fetcher.passages or PassageIndex(self.store)

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
            texts: Passages, or a ``BlockPrompt`` whose context is encoded. The first block of a
                prompt has the BOS token and no sink, unlike a passage with the same text.
            show_progress: Whether to show a progress bar.
            recipe: Recipe that overrides the engine's.

        Returns:
            Handles of the texts, in order.
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
        """Like ``encode``, but return statistics. ``as_prompt``: Whether the first block starts a
        prompt. ``on_progress``: Called with the number of finished tokens and the total.
        ``batch_tokens``: Size of a batch in tokens. Default: ``BlockModel.batch_tokens``."""
        return precompute(
            self._fetcher,
            blocks,
            run=self._scheduler.run,
            as_prompt=as_prompt,
            show_progress=show_progress,
            on_progress=on_progress,
            batch_tokens=batch_tokens,
            recipe=self._recipe_of(recipe),
        )

    def contains(self, block: Block, *, first: bool = False) -> bool:
        """Whether a block's KV is stored. ``first``: Whether the block starts a prompt."""
        return self._fetcher.contains(block, first=first, recipe=self.recipe)

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
            prompt: A ``BlockPrompt``, or a list of texts whose last item is the final block.
            mode: ``"block"`` reuses blocks; ``"full"`` runs ordinary attention over the same
                tokens.
            recipe: Recipe that overrides the engine's, for comparisons. Pass a ``Recipe`` rather
                than its folder, which would be read on every call.
            max_new_tokens: Maximum number of tokens to generate, within the context window.
            temperature: Sampling temperature. 0 or None: greedy, ignoring ``top_p`` and ``top_k``.
            top_p: Probability mass to sample from (nucleus sampling). None: the model's default.
            top_k: Number of most likely tokens to sample from. None: the model's default.
            stop: Strings that end the answer. They are removed from its text.
            seed: Random seed for sampling.
            generate_kwargs: ``response_format``, ``structured_outputs``, and arguments for
                transformers' ``generate``.

        Raises:
            ContextOverflowError: The prompt does not fit in the model's context window.
            MissError: A passage is not stored, and the engine has ``on_miss="error"``.
            ValueError, TypeError: An option is invalid, misspelled, or a setting of the engine.
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
            prompt: A prompt, or a function that creates it on the model's thread.
            group: Group of concurrent calls whose requests should share a batch.
            options: As for ``generate``.

        Returns:
            The request. ``result(timeout)`` waits for its answer; ``leave()`` cancels the request.
        """
        pending = self._pending(prompt, options, group=group)
        self._scheduler.submit(pending)
        return pending

    async def agenerate(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> Generation:
        """Async ``generate``. Calls in one iteration of the event loop may share a batch.

        Canceling the task stops the generation. See ``submit`` for ``prompt`` and ``group``.
        """
        pending = self._pending(prompt, options, group=group)
        self._scheduler.submit_in_turn(pending)
        return await pending.wait()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[GenerationChunk, None, None]:
        """Stream the answer to a prompt. ``options`` are those of ``generate``.

        The last chunk contains the complete ``Generation``. Closing the iterator stops the
        generation, and frees the model for other requests.
        """
        pending = self._pending(prompt, options)
        return pending.chunks(partial(self._scheduler.submit, pending))

    def astream(self, prompt: LatePrompt, **options: Any) -> AsyncGenerator[GenerationChunk, None]:
        """Async ``stream``."""
        pending = self._pending(prompt, options)
        return pending.achunks(partial(self._scheduler.submit_in_turn, pending))

    def generate_batch(
        self, prompts: Sequence[Prompt], *, batch_size: int = MAX_BATCH, **options: Any
    ) -> list[Generation]:
        """Answer several prompts. Returns the answers in order. ``options``: As for ``generate``.

        Up to ``batch_size`` prompts share a forward pass, if they have at most
        ``BlockModel.batch_tokens`` tokens to compute. Prompts are answered one by one if a batch
        could change the answers: for models with sliding windows or states, and with seeded
        sampling, beam search or penalties. The first error cancels the remaining prompts.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"Invalid batch_size {batch_size!r}: expected an integer, 1 or more.")
        options["recipe"] = self._recipe_of(options.get("recipe"))
        waiting = [self._pending(prompt, options, max_batch=batch_size) for prompt in prompts]
        return self._scheduler.submit_and_wait(*waiting)

    def answer_logits(
        self, prompt: Prompt, answer_ids: Sequence[int], *, mode: Mode = "block", **options: Any
    ) -> torch.Tensor:
        """Compute the logits that predict each token of an existing answer (teacher forcing).

        Args:
            prompt: As for ``generate``.
            answer_ids: Token ids of the answer, at least one.
            mode, options: As for ``generate``.

        Returns:
            Logits ``[answer tokens, vocab]`` in the model's dtype, on its device. The first row
            predicts the answer's first token.

        Raises the same errors as ``generate``, and ``ValueError`` if ``answer_ids`` is empty.
        """
        if not answer_ids:
            raise ValueError("answer_ids is empty: expected at least one token id.")
        parsed = self._options({**options, "mode": mode, "max_new_tokens": len(answer_ids)})
        blocks = to_block_prompt(prompt)
        return self._scheduler.run(lambda: self._runner.answer_logits(blocks, answer_ids, parsed))

    def _pending(
        self,
        prompt: LatePrompt,
        options: Mapping[str, Any],
        *,
        group: Group | None = None,
        max_batch: int = MAX_BATCH,
    ) -> PendingRequest:
        parsed = self._options(options)
        if not callable(prompt):  # Reject an invalid prompt in the caller's thread.
            prompt = to_block_prompt(prompt)
        needs = self.model.rules.start(parsed.sampling.grammar)
        return PendingRequest(
            prompt, parsed, self._runner, max_batch=max_batch, needs=needs, group=group
        )

    def _options(self, given: Mapping[str, Any]) -> GenerateOptions:
        return GenerateOptions.parse(given, self._recipe_of(given.get("recipe")))

    def _recipe_of(self, given: RecipeLike | None) -> Recipe:
        """Recipe of a call. ``None`` and ``"auto"`` select the engine's recipe."""
        if given is None or given is self._recipe or given == AUTO:
            return self._recipe
        return self._resolved(given)

    def _resolved(self, given: RecipeLike) -> Recipe:
        recipe = self._resolve(given)
        if self._positions is None:
            return recipe
        return replace(recipe, positions=self._positions)
