"""Ingestion: computing and storing the blocks that a store does not hold yet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

from tqdm.auto import tqdm

from blockattn_rag.engine.fetcher import PLAIN, BlockFetcher, Wanted, distinct
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.prompts.blocks import Block

_Batch = list[tuple[Wanted, BlockKV]]
Run = Callable[[Callable[[], _Batch | None]], _Batch | None]
"""Runs a piece of work on the model and returns its result."""

# Blocks that are sorted by length together: bounds memory, keeps padding low.
_WINDOW = 256


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """What ``precompute`` did, in distinct blocks. Texts of no tokens are in neither figure."""

    computed: int = 0
    reused: int = 0
    computed_tokens: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0

    def plus(self, kv: BlockKV) -> EncodeStats:
        """The figures with one more block that was computed and stored."""
        return replace(
            self,
            computed=self.computed + 1,
            computed_tokens=self.computed_tokens + kv.num_tokens,
            stored_bytes=self.stored_bytes + kv.nbytes,
        )


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
    """Compute and store what is absent. Each batch is stored when it is computed, so an
    interruption loses one batch at most.

    Args:
        run: called with one encoding batch at a time, so that answers come in between; blocks are
            stored in the caller's thread.
        as_prompt: the first of the blocks begins a prompt, and so holds the BOS token.
        on_progress: called with (blocks done, distinct blocks in all).
        batch_tokens: tokens of one encoding batch, padding included.
        recipe: How passages are encoded.

    Raises:
        ContextOverflowError: a block alone is longer than the model's context window.
        ValueError: there is something to compute, and the engine stores nothing (``read_only``).
        StoreError: a block cannot be stored.
    """
    started = time.perf_counter()
    found = fetcher.wanted(blocks, as_prompt=as_prompt, recipe=recipe)
    wanted = [*distinct(one for one in found if one.ids).values()]
    absent = [one for one in wanted if not fetcher.claim(one)]
    if absent and fetcher.access.read_only:
        raise ValueError(
            f"{len(absent)} of {len(wanted)} blocks are not in the store, and this engine was made "
            "with read_only=True; encode them by one that may write"
        )
    stats = EncodeStats(reused=len(wanted) - len(absent))
    progress = {"total": len(wanted), "initial": stats.reused, "desc": "Encoding blocks"}
    # No bar at all unless asked for, because even a disabled one starts a thread that outlives it.
    with tqdm(**progress) if show_progress else nullcontext() as bar:
        for at in range(0, len(absent), _WINDOW):
            batches = fetcher.encode(absent[at : at + _WINDOW], batch_tokens)
            while batch := run(partial(next, batches, None)):
                for _, kv in batch:
                    fetcher.store.put(kv.key, kv)
                    stats = stats.plus(kv)
                    if bar is not None:
                        bar.update()
                    if on_progress is not None:
                        on_progress(stats.reused + stats.computed, len(wanted))
    return replace(stats, seconds=time.perf_counter() - started)
