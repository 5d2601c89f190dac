"""Loading of blocks in background threads: all blocks of a prompt by a deadline, or none."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from blockattn_rag.errors import LoadError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.server.keys import BlockId
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.shares import Share
from blockattn_rag.store.base import KVStore, ReadResult, TierStats, find_blocks, is_damage
from blockattn_rag.store.concurrency import Readers, check_seconds, deadline, outcome, remaining
from blockattn_rag.store.memory import MemoryStore
from blockattn_rag.store.tiered import TieredStore

logger = logging.getLogger("blockattn_rag")


@dataclass(frozen=True, slots=True)
class LoaderStats:
    """Cumulative counts and times of a loader."""

    loads: int = 0
    failures: int = 0
    blocks: int = 0
    nbytes: int = 0
    misses: int = 0
    load_s: float = 0.0
    tiers: tuple[TierStats, ...] = ()


class BlockLoader:
    """Loads the blocks of prompts in background threads, with a deadline per prompt.

    Loaded blocks are validated against the requested token ids, the model, and the rank's shapes.

    Args:
        store: Store of this rank: ``open_share``, usually behind faster tiers.
        deadline_s: Timeout of a load in seconds, including the wait for a thread.
        most_waiting: Maximum number of running and waiting loads; further loads fail immediately.
    """

    def __init__(
        self,
        store: KVStore,
        profile: ModelProfile,
        share: Share,
        deadline_s: float = 10.0,
        threads: int = 8,
        most_waiting: int = 1024,
        kept: KVStore | None = None,
    ) -> None:
        self.store = store
        self._kept = MemoryStore(1) if kept is None else kept
        self._outline = share.token_outline(profile)
        self._deadline_s = check_seconds("deadline_s", deadline_s)
        if most_waiting < 1:
            raise ValueError(f"most_waiting must be 1 or more, found {most_waiting}")
        self._most_waiting = most_waiting
        # A store may hang, so enforcing the deadline of a read needs a second thread.
        self._readers = Readers(threads, "blockattn-rag-loader")
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="blockattn-rag-load")
        self._lock = threading.Lock()
        self._stats = LoaderStats()
        self._waiting = 0
        self._is_closed = False

    def start(self, blocks: Sequence[BlockId]) -> Future[list[BlockKV]]:
        """Start loading the blocks of a prompt. Never raises.

        Returns:
            A future that completes by the deadline, with the blocks in order or with a LoadError.
            The blocks' tensors may be shared with a store and must not be modified.
        """
        blocks = tuple(blocks)
        with self._lock:
            waiting, is_closed = self._waiting, self._is_closed
            is_taken = waiting < self._most_waiting and not is_closed
            if is_taken:
                self._waiting += 1
                load = self._pool.submit(self._load, blocks, deadline(self._deadline_s))
        if is_taken:
            # The callback runs immediately if the load has already ended.
            load.add_done_callback(self._note_end)
            return load
        self._count(failures=1)
        refused: Future[list[BlockKV]] = Future()
        why = "the loader is closed" if is_closed else f"{waiting} loads are running or waiting"
        places = tuple(block.place for block in blocks)
        refused.set_exception(LoadError(f"The blocks of the prompt were not loaded: {why}", places))
        return refused

    def stats(self) -> LoaderStats:
        tiers = self.store.tier_stats() if isinstance(self.store, TieredStore) else ()
        with self._lock:
            return replace(self._stats, tiers=tiers)

    def close(self) -> None:
        """Accept no more loads. Running loads complete, and waiting loads are canceled."""
        with self._lock:
            self._is_closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, blocks: Sequence[BlockId], until: float) -> list[BlockKV]:
        try:
            found = self._look_up(blocks, until)
        except LoadError as error:
            self._count(failures=1, misses=len(error.blocks), load_s=self._since(until))
            raise
        except Exception as error:
            if not isinstance(error, StoreError):
                # An unexpected error must not stop the engine, which serves other requests.
                logger.exception("Unexpected error while loading blocks")
            self._count(failures=1, load_s=self._since(until))
            places = tuple(block.place for block in blocks)
            raise LoadError(f"The blocks of the prompt were not loaded: {error}", places) from error
        self._count(
            loads=1,
            blocks=len(blocks),
            nbytes=sum(kv.nbytes for kv in found.values()),
            load_s=self._since(until),
        )
        return [found[block.place] for block in blocks]

    def _look_up(self, blocks: Sequence[BlockId], until: float) -> dict[int, BlockKV]:
        """Look up blocks. Returns them by index in the prompt, or raises if any is missing."""
        if not remaining(until):
            raise StoreError("other loads took all of the time until the deadline")

        def get_many(keys: Sequence[str]) -> Sequence[ReadResult]:
            read = self._readers.start(self.store.get_many, keys)
            return outcome(read, until, f"ask {self.store!r}")

        own = [block._replace(keys=block.keys[:1]) for block in blocks]
        kept, _ = find_blocks(own, self._kept.get_many, self._outline)
        absent = [block for block, kv in zip(blocks, kept, strict=True) if kv is None]
        stored, errors = find_blocks(absent, get_many, self._outline)
        found = {
            block.place: kv
            for block, kv in zip([*blocks, *absent], [*kept, *stored], strict=True)
            if kv is not None
        }
        if missing := [block for block in absent if block.place not in found]:
            raise _failure(missing, errors)
        return found

    def _since(self, until: float) -> float:
        """Return the seconds since the start of the load whose deadline is ``until``."""
        return deadline(self._deadline_s) - until

    def _count(self, **more: float) -> None:
        with self._lock:
            sums = {name: getattr(self._stats, name) + number for name, number in more.items()}
            self._stats = replace(self._stats, **sums)

    def _note_end(self, _load: Future[list[BlockKV]]) -> None:
        with self._lock:
            self._waiting -= 1


def _failure(missing: Sequence[BlockId], errors: Mapping[str, StoreError]) -> LoadError:
    """Create a LoadError that names the first missing block and the reason."""
    first = missing[0]
    others = f", and {len(missing) - 1} more" if len(missing) > 1 else ""
    reasons = [str(errors[key]) for key in first.keys if key in errors]
    keys = dict.fromkeys(key for block in missing for key in block.keys)
    return LoadError(
        f"Block {first.place} of the prompt ({len(first.ids)} tokens from token {first.start} on)"
        f"{others} cannot be loaded: {[_absence(first), *reasons][-1]}",
        tuple(block.place for block in missing),
        tuple(key for key in keys if is_damage(errors.get(key))),
    )


def _absence(block: BlockId) -> str:
    if block.keep.is_stored:
        return "it is in no reachable store"
    return "it is neither in a reachable store nor in this server's memory (private_memory)"
