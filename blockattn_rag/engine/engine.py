"""BlockAttentionEngine: a model and a KV store. What every adapter and the command line call."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockattn_rag.engine.fetcher import BlockFetcher
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike, resolve_recipe
from blockattn_rag.engine.ingest import EncodeStats, precompute
from blockattn_rag.engine.options import GenerateOptions, OnMiss
from blockattn_rag.engine.pending import MAX_BATCH, Group, PendingRequest
from blockattn_rag.engine.prefetch import Prefetched, Prefetcher, PrefetchStats
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

    May be called from many threads; the model runs one request at a time, whichever of the engines
    over it was asked.

    Args:
        model: the model.
        store: where KV lives: a store, the path of a ``DirectoryStore``, or None for memory.
        recipe: How the model runs in block mode: ``"auto"``, ``"none"``, the folder of a recipe,
            a ``Recipe``, or a sink alone such as ``"head:4"``. ``"auto"`` takes the best one that
            is known; see ``find_recipe.resolve_recipe``.
        resident_bytes: blocks that were read from the store stay ready on the model's device, up
            to this many bytes; 0 reads and checks them anew for every answer. Beside them, what
            the last answers computed behind their contexts stays for the next turns of their
            conversations, up to a quarter as many bytes (``engine.tails``).
        kv_dtype: ``"int8"`` keeps keys and values that are computed from now on in half the bytes
            or a quarter (``kv.quantization``), ``"model"`` as the model computes them. What the
            store holds is read in either form.
        namespace: where blocks are stored and looked for: what one tenant stored is no hit for
            another, and changes nothing of what is computed for him. Empty: where those store who
            gave none.
        read_namespaces: further namespaces that are read, in this order, and never written, such as
            ``("public",)``: collections that tenants share.
        read_only: store nothing; what is missing is computed, and kept in memory within
            ``resident_bytes``. Where it may, a store still learns that an entry was used.
        folder: Folder of the database that the store belongs to; ``recipe="auto"`` looks there
            first.
        positions: Overrides the recipe's positions; for experts.
        on_miss: ``"compute"`` encodes and stores a block that is not in the store; ``"error"``
            raises ``MissError``, for benchmarks.
        assembly: ``"relay"`` attends to blocks where they lie, ``"copy"`` joins them in new
            tensors; ``"auto"`` takes relay where the model allows it.

    Raises:
        ValueError: the recipe does not belong to the model, or an argument is out of range.
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
        resolved = self._resolved(recipe)
        self.defaults = GenerateOptions(on_miss=on_miss, assembly=assembly, recipe=resolved)
        self._fetcher = BlockFetcher(model, self.store, resident_bytes, access, kv_dtype)
        self._prefetcher = Prefetcher()
        self._scheduler = scheduler_of(model.lock)
        self._runner = Runner(model, self._fetcher, resident_bytes // SHARE)

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
        """Load a model (path, hub id, ``"bundled"``, or ready with its tokenizer), open a store."""
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
        """The model; another model takes an engine of its own."""
        return self._model

    @property
    def kv_dtype(self) -> KVDtype:
        """What blocks are kept in that this engine computes."""
        return self._fetcher.kv_dtype

    @property
    def access(self) -> Access:
        """Which namespaces of the store are read and written."""
        return self._fetcher.access

    @property
    def recipe(self) -> Recipe:
        """How the model runs in block mode."""
        return self.defaults.recipe

    # -- ingestion ---------------------------------------------------------------------------

    def encode(
        self,
        texts: Sequence[str | Block] | BlockPrompt,
        *,
        show_progress: bool = False,
        recipe: RecipeLike | None = None,
    ) -> list[str]:
        """Compute and store the KV of texts that are not stored yet; their handles, in order.

        Of a ``BlockPrompt``, the context is encoded, its first block as the beginning of a prompt:
        a block of its own, since it holds the BOS token. ``recipe`` overrides the engine's
        own.
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
        """``encode`` with figures of what was done; see ``ingest.precompute``."""
        return precompute(
            self._fetcher,
            blocks,
            run=self._scheduler.run,
            as_prompt=as_prompt,
            show_progress=show_progress,
            on_progress=on_progress,
            batch_tokens=batch_tokens,
            recipe=self._recipe(recipe),
        )

    def prefetch(
        self,
        passages: Sequence[str | Block],
        *,
        recipe: RecipeLike | None = None,
    ) -> None:
        """Begin to read passages from the store, before the prompt that will hold them is there.

        Returns at once and raises nothing; ``prefetches`` counts. What is read stays in memory,
        until ``resident_bytes`` are full: give the likeliest passages first. An answer waits for
        reads that are going on. Nothing is computed: see ``encode``. ``recipe`` as for
        ``encode``.
        """
        given = [passages] if isinstance(passages, str) else list(passages)
        self._prefetcher.submit(len(given), partial(self._prefetch, given, recipe))

    @property
    def prefetches(self) -> PrefetchStats:
        """What ``prefetch`` has read so far."""
        return self._prefetcher.stats

    def contains(self, block: Block, *, first: bool = False) -> bool:
        """Whether a block's KV is stored. ``first``: as the first block of a prompt."""
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
            prompt: a ``BlockPrompt``, or a list whose last item is the final block.
            mode: ``"block"`` reuses blocks; ``"full"`` is ordinary attention over the same tokens.
            recipe: Overrides the engine's own, for comparisons. Pass a ``Recipe``, because a folder
                is read in every call.
            max_new_tokens: at most this many, less if the context window ends before.
            temperature: 0 or None is greedy; ``top_p`` and ``top_k`` apply above 0.
            stop: strings that end the answer; they are not part of it.
            seed: makes sampling repeatable.
            generate_kwargs: ``response_format``, ``structured_outputs``, ``on_miss`` and
                ``assembly`` in place of the engine's own, and anything transformers' ``generate``
                takes.

        Raises:
            ContextOverflowError: the prompt does not fit in the model's context window.
            MissError: a block is not stored and ``on_miss`` is ``"error"``.
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
        """Ask for an answer without waiting; ``options`` are those of ``generate``.

        Args:
            prompt: a prompt, or a function that makes it on the model's thread.
            group: calls whose requests are to be answered in one batch.

        Returns:
            The pending request: ``result(timeout)`` waits for its answer, ``leave()`` gives it up.
        """
        pending = self._pending(prompt, options, group=group)
        self._scheduler.submit(pending)
        return pending

    async def agenerate(
        self, prompt: LatePrompt, *, group: Group | None = None, **options: Any
    ) -> Generation:
        """``generate`` for event loops; calls of the same turn of the loop share a batch.

        Cancelling the task ends the generation. For ``prompt`` and ``group`` see ``submit``.
        """
        pending = self._pending(prompt, options, group=group)
        self._scheduler.submit_in_turn(pending)
        return await pending.wait()

    def stream(self, prompt: Prompt, **options: Any) -> Generator[GenerationChunk, None, None]:
        """Answer a prompt piece by piece; ``options`` are those of ``generate``.

        The last chunk carries the whole ``Generation``. Leaving the iterator early ends the
        generation and frees the model.
        """
        return self._scheduler.stream(self._pending(prompt, options))

    def astream(self, prompt: LatePrompt, **options: Any) -> AsyncGenerator[GenerationChunk, None]:
        """``stream`` for event loops."""
        return self._scheduler.astream(self._pending(prompt, options))

    def generate_batch(
        self, prompts: Sequence[Prompt], *, batch_size: int = MAX_BATCH, **options: Any
    ) -> list[Generation]:
        """Answer several prompts, in order; ``options`` are those of ``generate``.

        Up to ``batch_size`` prompts share each forward where that gives ``generate``'s answers:
        models with sliding windows, seeded sampling, and options that look back at the prompt
        (beams, penalties) are answered one by one. Prompts of more tokens to compute than
        ``BlockModel.batch_tokens`` go in smaller batches.
        """
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size must be a whole number from 1 on, found {batch_size!r}")
        options["recipe"] = self._recipe(options.get("recipe"))  # once for all prompts
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
        """What the model predicts at each token of a given answer (teacher forcing).

        Args:
            prompt: as for ``generate``.
            answer_ids: token ids of an answer, at least one.
            mode, options: as for ``generate``.

        Returns:
            Logits ``[answer tokens, vocab]``, the first row before the answer's first token; in the
            model's dtype, on its device.

        Raises as ``generate``.
        """
        if not answer_ids:
            raise ValueError("the answer has no token to predict")
        parsed = self._options({**options, "mode": mode, "max_new_tokens": len(answer_ids)})
        answer_logits = self._runner.answer_logits
        return self._scheduler.run(partial(answer_logits, made(prompt), answer_ids, parsed))

    def answer_batch(self, requests: Sequence[PendingRequest]) -> None:
        """Answer requests with equal options. For the scheduler, which runs this on the model's
        thread."""
        self._runner.answer_batch(requests)

    # -- inside ------------------------------------------------------------------------------

    def _prefetch(self, passages: Sequence[str | Block], recipe: RecipeLike | None) -> Prefetched:
        blocks = [one if isinstance(one, Block) else Block(one) for one in passages if one != ""]
        return self._fetcher.prefetch(blocks, recipe=self._recipe(recipe))

    def _pending(
        self, prompt: LatePrompt, options: Mapping[str, Any], **scheduling: Any
    ) -> PendingRequest:
        parsed = self._options(options)
        if not callable(prompt):  # a bad one is refused now, not when its turn comes
            prompt = made(prompt)
        make_prompt = partial(made, prompt)
        can_share = partial(self.model.batches_exactly, parsed.sampling)
        needs = self.model.compiling(parsed.sampling.grammar)
        return PendingRequest(
            make_prompt, parsed, self.answer_batch, can_share, needs=needs, **scheduling
        )

    def _options(self, given: Mapping[str, Any]) -> GenerateOptions:
        recipe = self._recipe(given.get("recipe"))
        return GenerateOptions.parse({**given, "recipe": recipe}, self.defaults)

    def _recipe(self, given: RecipeLike | None) -> Recipe:
        """The recipe of a call."""
        if given is None or given is self.recipe or given == AUTO:
            return self.recipe
        return self._resolved(given)

    def _resolved(self, given: RecipeLike) -> Recipe:
        found = resolve_recipe(given, self._model, self.store, self._folder)
        return found.with_positions(self._positions)
