"""BlockAttentionEngine: a model and a KV store. What every adapter and the command line call."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from blockattn_rag.engine.fetcher import BlockFetcher, OnMiss
from blockattn_rag.engine.ingest import EncodeStats, precompute
from blockattn_rag.engine.options import Prompt, Request, Reuse
from blockattn_rag.engine.results import (
    Generation,
    GenerationChunk,
    Mode,
    ReuseStats,
)
from blockattn_rag.engine.runner import Answerer, Call, Prepared
from blockattn_rag.engine.scheduler import BATCH_SIZE, Seat
from blockattn_rag.engine.streams import stream_from_thread
from blockattn_rag.kv.context import Assembly, Positions, place
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.store import DEFAULT_RESIDENT_BYTES, KVStore, open_store

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_T = TypeVar("_T")

logger = logging.getLogger("blockattn_rag")

# Models whose users were told that they are not fine-tuned: once for all engines over one.
_warned_of: WeakSet[PreTrainedModel] = WeakSet()


class BlockAttentionEngine:
    """Answers prompts made of blocks, reusing every block's keys and values.

    May be called from many threads; the model runs one request at a time, whichever of the engines
    over it was asked.

    Args:
        model: the model.
        store: where KV lives: a store, the path of a ``DirectoryStore``, or None for memory.
        on_miss: ``"compute"`` encodes and stores a block that is not in the store; ``"error"``
            raises ``MissError``, for benchmarks.
        positions: ``"reordered"`` re-encodes positions; ``"composite"`` is the papers' ablation.
        assembly: ``"relay"`` attends to blocks where they lie, ``"copy"`` joins them in new
            tensors; ``"auto"`` takes relay where the model allows it.
        resident_bytes: blocks that were read from the store stay ready on the model's device, up
            to this many bytes; 0 reads and checks them anew for every answer.
    """

    def __init__(
        self,
        model: BlockModel,
        store: KVStore | str | Path | None = None,
        *,
        on_miss: OnMiss = "compute",
        positions: Positions = "reordered",
        assembly: Assembly = "auto",
        resident_bytes: int = DEFAULT_RESIDENT_BYTES,
    ) -> None:
        self._model = model
        self.store = open_store(store)
        self.reuse = Reuse(on_miss, positions, assembly).checked()
        self._answerer = Answerer(model)
        self._fetcher = BlockFetcher(model, self.store, resident_bytes)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Any = None,
        store: KVStore | str | Path | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        on_miss: OnMiss = "compute",
        positions: Positions = "reordered",
        assembly: Assembly = "auto",
        resident_bytes: int = DEFAULT_RESIDENT_BYTES,
        **model_kwargs: Any,
    ) -> BlockAttentionEngine:
        """Load a model (path, hub id, ``"bundled"``, or ready with its tokenizer), open a store."""
        loaded = BlockModel.from_pretrained(
            model, tokenizer=tokenizer, device=device, dtype=dtype, **model_kwargs
        )
        return cls(
            loaded,
            store,
            on_miss=on_miss,
            positions=positions,
            assembly=assembly,
            resident_bytes=resident_bytes,
        )

    @property
    def model(self) -> BlockModel:
        """The model; another model takes an engine of its own."""
        return self._model

    # -- ingestion ---------------------------------------------------------------------------

    def encode(
        self, texts: Sequence[str | Block] | BlockPrompt, *, show_progress: bool = False
    ) -> list[str]:
        """Compute and store the KV of texts that are not stored yet; their handles, in order.

        Of a ``BlockPrompt``, the context is encoded, its first block as the beginning of a prompt:
        a block of its own, since it holds the BOS token.
        """
        if isinstance(texts, str):
            raise TypeError("encode takes a list of texts, found one str; pass [text]")
        as_prompt = isinstance(texts, BlockPrompt)
        given = texts.context if isinstance(texts, BlockPrompt) else texts
        blocks = [text if isinstance(text, Block) else Block(text) for text in given]
        self.precompute(blocks, as_prompt=as_prompt, show_progress=show_progress)
        return [block.handle for block in blocks]

    def precompute(
        self,
        blocks: Sequence[Block],
        *,
        as_prompt: bool = False,
        show_progress: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        batch_tokens: int | None = None,
    ) -> EncodeStats:
        """``encode`` with figures of what was done; see ``ingest.precompute``."""

        def run(work: Callable[[], _T]) -> _T:
            with self.model.lock:
                return work()

        return precompute(
            self._fetcher,
            blocks,
            run=run,
            as_prompt=as_prompt,
            show_progress=show_progress,
            on_progress=on_progress,
            batch_tokens=batch_tokens,
        )

    def contains(self, block: Block, *, first: bool = False) -> bool:
        """Whether a block's KV is stored. ``first``: as the first block of a prompt."""
        return self._fetcher.contains(block, first=first)

    # -- answering ---------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        *,
        mode: Mode = "block",
        positions: Positions | None = None,
        on_miss: OnMiss | None = None,
        assembly: Assembly | None = None,
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
            positions, on_miss, assembly: override the engine's own.
            max_new_tokens: at most this many, less if the context window ends before.
            temperature: 0 or None is greedy; ``top_p`` and ``top_k`` apply above 0.
            stop: strings that end the answer; they are not part of it.
            seed: makes sampling repeatable.
            generate_kwargs: anything transformers' ``generate`` takes.

        Raises:
            ContextOverflowError: the prompt does not fit in the model's context window.
            MissError: a block is not stored and ``on_miss`` is ``"error"``.
        """
        options = {
            "mode": mode,
            "positions": positions,
            "on_miss": on_miss,
            "assembly": assembly,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "stop": stop,
            "seed": seed,
        }
        request = self._request(prompt, options | generate_kwargs)
        return self._answerer.answer(request, self._prepare(request))

    def stream(self, prompt: Prompt, **options: Any) -> Iterator[GenerationChunk]:
        """Answer a prompt piece by piece; ``options`` are those of ``generate``.

        The last chunk carries the whole ``Generation``. Leaving the iterator early ends the
        generation and frees the model.
        """
        request = self._request(prompt, options)
        return stream_from_thread(
            lambda on_text, is_cancelled: self._answerer.answer(
                request, self._prepare(request), on_text, is_cancelled
            )
        )

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        batch_size: int = BATCH_SIZE,
        seats: Sequence[Seat] | None = None,
        **options: Any,
    ) -> list[Generation]:
        """Answer several prompts, in order; ``options`` are those of ``generate``.

        Up to ``batch_size`` prompts share each forward where that gives ``generate``'s answers:
        models with sliding windows, seeded sampling, and options that look back at the prompt
        (beams, penalties) are answered one by one. Times are those of the whole batch. Prompts of
        more tokens to compute than ``BlockModel.batch_tokens`` go in smaller batches.

        ``seats`` are the calls that wait, one for each prompt: each gets its answer as soon as it
        is there, and an answer ends when those who wait for it have left.
        """
        seats = [Seat() for _ in prompts] if seats is None else seats
        requests = [
            self._request(prompt, options)._replace(started=seat.started)
            for prompt, seat in zip(prompts, seats, strict=True)
        ]
        for at in range(0, len(requests), batch_size):
            batch = slice(at, at + batch_size)
            prepared = [self._prepare(request) for request in requests[batch]]
            calls = map(Call, requests[batch], prepared, seats[batch])
            self._answerer.answer_batch(list(calls))
        return [seat.answer.result() for seat in seats]

    # -- inside ------------------------------------------------------------------------------

    def _request(self, prompt: Prompt, options: Mapping[str, Any]) -> Request:
        request = Request.parse(prompt, options, self.reuse)
        if request.mode == "block" and request.prompt.context:
            self._warn_if_untuned()
        return request

    def _warn_if_untuned(self) -> None:
        if self.model.is_block_tuned or self.model.hf_model in _warned_of:
            return
        _warned_of.add(self.model.hf_model)
        logger.warning(
            "%s is not known to be block-fine-tuned: in block mode its answers will be less "
            "accurate than in full mode (the papers measured 48 against 68 points without "
            "fine-tuning). Fine-tune it with `blockattn-rag train`, measure it with "
            "`blockattn-rag eval`, or use mode='full'.",
            self.model.name,
        )

    def _prepare(self, request: Request) -> Prepared:
        """Tokenise the prompt (full mode), or fetch and place its blocks (block mode)."""
        prompt, tokenizer = request.prompt, self.model.tokenizer
        if request.mode == "full":
            ids = tokenizer.prompt_ids(prompt)
            limit = self.model.room_for(len(ids.flat), request.sampling)
            context_ids = [token for block in ids.context for token in block]
            stats = ReuseStats("full", computed_tokens=len(ids.flat))
            return Prepared(context_ids, ids.final, None, limit, stats)
        started = time.perf_counter()
        context, final = self._with_final_tokens(prompt)

        def check_room(tokens: int) -> int:
            return self.model.room_for(tokens + len(final), request.sampling)

        blocks, hits, misses, missed_tokens = self._fetcher.fetch(
            context, request.reuse.on_miss, check_room
        )
        placed = place(blocks, request.reuse.positions)
        limit = check_room(placed.num_tokens)
        stats = ReuseStats(
            "block",
            hits=hits,
            misses=misses,
            reused_tokens=placed.num_tokens - missed_tokens,
            computed_tokens=missed_tokens + len(final),
            fetch_s=time.perf_counter() - started,
        )
        return Prepared(placed.token_ids, final, placed, limit, stats)

    def _with_final_tokens(self, prompt: BlockPrompt) -> tuple[list[Block], list[int]]:
        """Context blocks, and the final block's tokens: the last block's if that is empty, since
        something must be predicted from."""
        tokenizer, context = self.model.tokenizer, list(prompt.context)
        final = tokenizer.final_ids(prompt.final_spans, first=not context)
        while context and not final:
            final = tokenizer.block_ids(context.pop(), first=not context)
        if not final:
            raise ValueError("the prompt holds no token")
        return context, final
