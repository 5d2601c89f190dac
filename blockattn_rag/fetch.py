"""Getting blocks' keys and values: from the store where they are, from the model where not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from tqdm.auto import tqdm

from blockattn_rag.blocks import Block
from blockattn_rag.errors import MissError, StoreError
from blockattn_rag.kv import BlockKV, store_key
from blockattn_rag.model import BlockModel, EncodeRequest

if TYPE_CHECKING:
    from blockattn_rag.store import KVStore

logger = logging.getLogger("blockattn_rag")

OnMiss = Literal["compute", "error"]

# Blocks that `precompute` sorts by length together: bounds memory, keeps padding low.
_PRECOMPUTE_WINDOW = 256


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """What ``precompute`` did. ``computed + reused`` is the number of distinct blocks."""

    computed: int = 0
    reused: int = 0
    computed_tokens: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0


class Fetched(NamedTuple):
    """The KV of a prompt's context blocks, in order, and how it was come by.

    ``missed_tokens`` counts the tokens that had to be computed, each block once.
    """

    blocks: list[BlockKV]
    hits: int
    misses: int
    missed_tokens: int


class _Wanted(NamedTuple):
    digest: str
    block: Block
    first: bool


class BlockFetcher:
    """A model and a store, and the promise that what comes out is this model's KV of this text.

    Args:
        lock: held while the model computes.
    """

    def __init__(self, model: BlockModel, store: KVStore, lock: threading.Lock) -> None:
        self._model = model
        self._store = store
        self._lock = lock

    def contains(self, block: Block, *, first: bool = False) -> bool:
        """Whether there is an entry for the block; whether it is sound is seen when it is read."""
        return self._key(block.digest(first=first)) in self._store

    def fetch(self, context: Sequence[Block], on_miss: OnMiss) -> Fetched:
        """KV of a prompt's context blocks; absent ones are computed together and stored."""
        wanted = [
            _Wanted(block.digest(first=index == 0), block, index == 0)
            for index, block in enumerate(context)
        ]
        distinct = {one.digest: one for one in wanted}
        found = {digest: self._look_up(digest) for digest in distinct}
        missing = [one for one in distinct.values() if found[one.digest] is None]
        if missing and on_miss == "error":
            raise MissError(
                f"{len(missing)} of {len(wanted)} blocks are not in the store and on_miss='error'; "
                f"the first is {missing[0].block.text[:60]!r}. Encode them before (engine.encode), "
                "or use on_miss='compute'"
            )
        computed = dict(self._encode(missing))
        found |= computed
        # A text of no tokens has no KV and leaves no trace in the prompt.
        blocks = [kv for one in wanted if (kv := found[one.digest]) is not None]
        missed_tokens = sum(kv.num_tokens for kv in computed.values() if kv is not None)
        return Fetched(blocks, len(wanted) - len(missing), len(missing), missed_tokens)

    def precompute(
        self,
        blocks: Sequence[Block],
        *,
        show_progress: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
        batch_tokens: int | None = None,
    ) -> EncodeStats:
        """Compute and store what is absent. Each batch is stored when it is done, so an
        interruption loses one batch at most.

        Args:
            on_progress: called with (blocks done, distinct blocks in all).
            batch_tokens: tokens of one encoding batch, padding included.
        """
        started = time.perf_counter()
        wanted = {b.digest(first=False): b for b in blocks}
        absent = [
            _Wanted(d, b, False) for d, b in wanted.items() if self._key(d) not in self._store
        ]
        stats = EncodeStats(reused=len(wanted) - len(absent))
        done = stats.reused
        with tqdm(
            total=len(wanted), initial=done, desc="Encoding blocks", disable=not show_progress
        ) as bar:
            for at in range(0, len(absent), _PRECOMPUTE_WINDOW):
                for _, kv in self._encode(absent[at : at + _PRECOMPUTE_WINDOW], batch_tokens):
                    stats = _counted(stats, kv)
                    done += 1
                    bar.update()
                    if on_progress is not None:
                        on_progress(done, len(wanted))
        return replace(stats, seconds=time.perf_counter() - started)

    def _key(self, digest: str) -> str:
        return store_key(self._model.fingerprint, digest)

    def _look_up(self, digest: str) -> BlockKV | None:
        """The stored KV if it is sound and is what was asked for. A bad entry is a miss."""
        try:
            kv = self._store.get(self._key(digest))
        except StoreError as error:
            logger.warning("%s. The block is computed again and the entry overwritten.", error)
            return None
        if kv is None:
            return None
        if (kv.fingerprint, kv.digest) != (self._model.fingerprint, digest):
            logger.warning(
                "The store holds under %s another block or another model's KV (digest %s, "
                "fingerprint %s). The block is computed again and the entry overwritten.",
                self._key(digest), kv.digest[:12], kv.fingerprint[:12],
            )  # fmt: skip
            return None
        return kv.to(self._model.device)

    def _encode(
        self, wanted: Sequence[_Wanted], batch_tokens: int | None = None
    ) -> Iterator[tuple[str, BlockKV | None]]:
        """Compute and store; yields (digest, KV or None for a text of no tokens)."""
        tokenizer = self._model.tokenizer
        requests = [
            EncodeRequest(tokenizer.block_ids(w.block, first=w.first), w.digest, w.block.handle)
            for w in wanted
        ]
        for request in requests:
            if not request.token_ids:
                yield request.digest, None
        batches = self._model.encode(
            [r for r in requests if r.token_ids], batch_tokens=batch_tokens
        )
        while True:
            with self._lock:  # one batch at a time: other requests may come in between
                batch = next(batches, None)
            if batch is None:
                return
            for kv in batch:
                self._store.put(self._key(kv.digest), kv)
                yield kv.digest, kv


def _counted(stats: EncodeStats, kv: BlockKV | None) -> EncodeStats:
    if kv is None:
        return stats
    return replace(
        stats,
        computed=stats.computed + 1,
        computed_tokens=stats.computed_tokens + kv.num_tokens,
        stored_bytes=stats.stored_bytes + kv.nbytes,
    )
