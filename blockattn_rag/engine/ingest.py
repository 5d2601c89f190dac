"""Ingestion: computes and stores blocks that are not in the store yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from tqdm.auto import tqdm

from blockattn_rag.engine.fetcher import PLAIN, BlockFetcher, BlockSpec, merge_specs
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.prompts.recognition import entries_of

_Batch = list[tuple[BlockSpec, BlockKV]]
Run = Callable[[Callable[[], _Batch | None]], _Batch | None]
"""Function that runs another function on the model's thread, and returns its result."""

# Number of blocks that are sorted by length at a time, so that batches need little padding.
_WINDOW = 256


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """Statistics of ``BlockAttentionEngine.precompute``, over distinct blocks that have tokens.

    Args:
        computed: Number of blocks computed and stored.
        reused: Number of blocks that were already stored.
        computed_tokens: Number of tokens in the computed blocks.
        stored_bytes: Size of the computed blocks in bytes.
        seconds: Duration of the call in seconds.
    """

    computed: int = 0
    reused: int = 0
    computed_tokens: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0


def blocks_to_encode(texts: Sequence[str | Block] | BlockPrompt) -> tuple[list[Block], bool]:
    """Convert ``encode``'s argument to blocks. Also returns whether the first starts a prompt."""
    if isinstance(texts, str) or not isinstance(texts, (Iterable, BlockPrompt)):
        raise TypeError(f"Expected a list of texts, found {type(texts).__name__}: pass [text].")
    as_prompt = isinstance(texts, BlockPrompt)
    items = texts.context if isinstance(texts, BlockPrompt) else texts
    return [item if isinstance(item, Block) else Block(item) for item in items], as_prompt


def precompute(
    fetcher: BlockFetcher,
    blocks: Sequence[Block],
    *,
    run: Run,
    as_prompt: bool = False,
    show_progress: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    batch_tokens: int | None = None,
    recipe: Recipe = PLAIN,
) -> EncodeStats:
    """Compute and store missing blocks, and index the passages, so that they are recognized in
    prompts without markers. If interrupted, at most one batch must be computed again.

    Args:
        run: Function that encodes one batch on the model's thread. Other requests may run between
            batches. Blocks are stored in the caller's thread.
        as_prompt: Whether the first block starts a prompt, and therefore has the BOS token.
        on_progress: Called with the number of tokens in finished blocks and in all distinct
            blocks: first for the blocks that are already stored, then after each block.
        batch_tokens: Size of a batch in tokens. Default: ``BlockModel.batch_tokens``.
    """
    started = time.perf_counter()
    specs = [*merge_specs(fetcher.specs(blocks, as_prompt=as_prompt, recipe=recipe)).values()]
    absent = [spec for spec in specs if not fetcher.claim(spec)]
    if absent and fetcher.access.read_only:
        raise ValueError(
            f"{len(absent)} of {len(specs)} blocks are not in the store, and this engine has "
            "read_only=True: encode them with an engine that has read_only=False."
        )
    stats = EncodeStats(reused=len(specs) - len(absent))
    total, left = (sum(len(spec.ids) for spec in group) for group in (specs, absent))
    with progress(total, total - left, show_progress, on_progress) as report:
        for at in range(0, len(absent), _WINDOW):
            batches = fetcher.encode(absent[at : at + _WINDOW], batch_tokens)
            while batch := run(partial(next, batches, None)):
                for _, kv in batch:
                    fetcher.store.put(kv.key, kv)
                    stats = replace(
                        stats,
                        computed=stats.computed + 1,
                        computed_tokens=stats.computed_tokens + kv.num_tokens,
                        stored_bytes=stats.stored_bytes + kv.nbytes,
                    )
                    report(kv.num_tokens)
    if fetcher.passages is not None and not fetcher.access.read_only:
        texts = [block.text for block in blocks[as_prompt:] if block.origin == "passage"]
        fetcher.passages.add(entries_of(texts), fetcher.access.namespace)
    return replace(stats, seconds=time.perf_counter() - started)


@contextmanager
def progress(
    total: int,
    done: int,
    show: bool,
    on_progress: Callable[[int, int], None] | None,
    unit: str = "tokens",
) -> Iterator[Callable[[int], None]]:
    """Yield a function that reports newly finished work to a progress bar and a callback.
    Work is measured in tokens (or another ``unit``), because blocks differ in length."""
    # The bar is created only on request: even a disabled bar starts a thread that outlives it.
    bar = tqdm(total=total, initial=done, desc=f"Encoding {unit}") if show else None

    def report(more: int) -> None:
        nonlocal done
        done += more
        if bar is not None:
            bar.update(more)
        if on_progress is not None:
            on_progress(done, total)

    with nullcontext() if bar is None else bar:
        report(0)
        yield report
