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
    """Engine that answers prompts made of blocks, and reuses each block's keys and values.

    Thread-safe. Engines can share a model, which runs one request or batch at a time.

    Args:
        model: A loaded model. To load it by path or hub id, use ``from_pretrained``.
        store: KV store, or path of a ``DirectoryStore``. Default: an in-memory store.
        recipe: How the model runs in block mode: ``"auto"``, settings such as ``"none"``,
            ``"fast"`` or ``"head+recompute:0.1"``, a ``Recipe``, or a recipe's folder. ``"auto"``
            uses the model's recipe, or ``stock`` without one (docs/guides/stock_models.md).
        resident_bytes: Maximum bytes of stored blocks to cache on the model's device. With 0, each
            answer reads its blocks from the store. Up to another quarter of this size is used to
            cache final blocks and answers for the next turn of a conversation (``engine.tails``).
        kv_dtype: Type of new keys and values: ``"model"``, or ``"int8"`` for half or a quarter of
            the size (``kv.quantization``). Stored blocks of either type can be read.
        namespace: Isolates tenants: blocks stored under one namespace are invisible to others.
            Empty: the default namespace.
        read_namespaces: Other namespaces to read from, in order, such as ``("public",)`` for
            passages that tenants share. They are never written to.
        read_only: Whether to only read blocks from the store. Answers compute missing blocks, and
            cache them within ``resident_bytes``. The store may still record that an entry was used.
        folder: Folder of the database that the store belongs to. ``recipe="auto"`` searches it
            first.
        stock: Settings of ``recipe="auto"`` for a stock model without a recipe.
        positions: Override for the recipe's ``positions``: ``"reordered"`` or ``"composite"``.
        on_miss: ``"compute"`` encodes and stores blocks that are not in the store. ``"error"``
            raises ``MissError``, for benchmarks.
        assembly: ``"relay"`` attends to blocks in place. ``"copy"`` concatenates them in new
            tensors. ``"auto"`` uses relay if the model supports it and the final block is short,
            except for single requests on a GPU.

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
        """The model. It cannot be replaced: create an engine for each model."""
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
        """Index of encoded passages, used to find them in prompts without markers.

        Raises:
            ValueError: the store does not support an index.
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
            texts: Passages, or a ``BlockPrompt`` whose context is encoded. A prompt's first block
                has a BOS token, so it is not shared with a passage of the same text.
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
        prompt. ``on_progress``: Called with the numbers of finished and of all tokens.
        ``batch_tokens``: Maximum number of tokens in an encoding batch, including padding."""
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
            prompt: A ``BlockPrompt``, or a list whose last item is the final block.
            mode: ``"block"`` reuses blocks; ``"full"`` runs ordinary attention over the same
                tokens.
            recipe: Recipe that overrides the engine's, for comparisons. Pass a ``Recipe`` rather
                than its folder, which would be read on every call.
            max_new_tokens: Maximum number of tokens to generate, within the context window.
            temperature: Sampling temperature. 0 or None: greedy, ignoring ``top_p`` and ``top_k``.
            top_p: Probability mass to sample from (nucleus sampling).
            top_k: Number of most likely tokens to sample from.
            stop: Strings that end the answer. They are removed from its text.
            seed: Random seed for sampling.
            generate_kwargs: ``response_format``, ``structured_outputs``, and arguments for
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
            prompt: A prompt, or a function that creates it on the model's thread.
            group: Concurrent calls that share a batch.
            options: As for ``generate``.

        Returns:
            The pending request. ``result(timeout)`` waits for the answer, ``leave()`` cancels it.
        """
        pending = self._pending(prompt, options, group=group)
        self._scheduler.submit(pending)
        return pending

    async def agenerate(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> Generation:
        """Async ``generate``. Calls in the same iteration of the event loop share a batch.

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
        """Answer several prompts, in order. ``options`` are those of ``generate``.

        Up to ``batch_size`` prompts share each forward pass, with at most
        ``BlockModel.batch_tokens`` tokens (including contexts if the recipe recomputes tokens).
        Prompts are answered one by one if a batch could change the answers: for models with sliding
        windows, seeded sampling, beam search, and penalties.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"Invalid batch_size {batch_size!r}: expected an integer, 1 or more.")
        # Resolve the recipe once for all prompts.
        options["recipe"] = self._recipe_of(options.get("recipe"))
        waiting = [self._pending(prompt, options, max_batch=batch_size) for prompt in prompts]
        return self._scheduler.submit_and_wait(*waiting)

    def answer_logits(
        self, prompt: Prompt, answer_ids: Sequence[int], *, mode: Mode = "block", **options: Any
    ) -> torch.Tensor:
        """Compute the model's logits for each token of an existing answer (teacher forcing).

        Args:
            prompt: As for ``generate``.
            answer_ids: Token ids of the answer, at least one.
            mode, options: As for ``generate``.

        Returns:
            Logits ``[answer tokens, vocab]`` in the model's dtype, on its device. The first row
            predicts the answer's first token.

        Raises the same errors as ``generate``.
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
