"""Loads blocks in background threads: all blocks of a prompt by a deadline, or none."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from blockattn_rag.errors import LoadError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.server.keys import BlockId
from blockattn_rag.store.base import KVStore, ReadResult, find_blocks, is_damage
from blockattn_rag.store.checks import Outline
from blockattn_rag.store.concurrency import Readers, outcome, remaining

logger = logging.getLogger("blockattn_rag")

_THREADS, _MOST_WAITING = 8, 1024  # Threads, and maximum number of unfinished loads.


class BlockLoader:
    """Loads the blocks of prompts in background threads, with a deadline per prompt.

    Loaded blocks are validated against the requested token ids, the model, and the rank's shapes.

    Args:
        store: This rank's store, from ``open_share``, usually behind faster tiers.
        outline: ``Share.token_outline`` of this rank.
        kept: In-memory store of this rank, for blocks that are not in ``store``.
        count: Thread-safe function that adds a number to a counter of ``metrics.PLAIN``.
        deadline_s: Timeout of a load in seconds, including the wait for a thread.
    """

    def __init__(
        self,
        store: KVStore,
        outline: Outline,
        kept: KVStore,
        count: Callable[[str, float], None],
        deadline_s: float,
    ) -> None:
        self._store = store
        self._kept = kept
        self._count = count
        self._outline = outline
        self._deadline_s = deadline_s
        # A store may hang, so enforcing the deadline of a read needs a second thread.
        self._readers = Readers(_THREADS, "blockattn-rag-loader")
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="blockattn-rag-load")
        self._room = threading.Semaphore(_MOST_WAITING)

    def start(self, blocks: Sequence[BlockId]) -> Future[list[BlockKV]]:
        """Start loading the blocks of a prompt. Never raises: the future completes by the deadline,
        with the blocks in order or a LoadError. The tensors may be shared: do not modify them."""
        why = f"{_MOST_WAITING} loads are running or waiting"
        if self._room.acquire(blocking=False):
            try:
                load = self._pool.submit(self._load, tuple(blocks), time.monotonic())
            except RuntimeError:  # The threads were stopped.
                why = "the loader is closed"
            else:
                load.add_done_callback(lambda _: self._room.release())
                return load
        self._count("load_failures", 1)
        refused: Future[list[BlockKV]] = Future()
        refused.set_exception(_not_loaded(blocks, why))
        return refused

    def close(self) -> None:
        """Accept no more loads. Running loads complete, and waiting loads are canceled."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, blocks: Sequence[BlockId], began: float) -> list[BlockKV]:
        try:
            found = self._look_up(blocks, began + self._deadline_s)
        except Exception as error:
            self._count("load_failures", 1)
            if isinstance(error, LoadError):
                self._count("load_misses", len(error.blocks))
                raise
            if not isinstance(error, StoreError):
                # An unexpected error must not stop the engine, which serves other requests.
                logger.exception("Unexpected error while loading blocks")
            raise _not_loaded(blocks, error) from error
        finally:
            self._count("load_seconds", time.monotonic() - began)
        self._count("loads", 1)
        self._count("loaded_blocks", len(blocks))
        self._count("loaded_bytes", sum(kv.nbytes for kv in found.values()))
        return [found[block.place] for block in blocks]

    def _look_up(self, blocks: Sequence[BlockId], until: float) -> dict[int, BlockKV]:
        """Return blocks by ``place``. Raises LoadError, or StoreError if the deadline passes."""
        if not remaining(until):
            raise StoreError("The load waited for others until its deadline; raise load_deadline_s")

        def get_many(keys: Sequence[str]) -> Sequence[ReadResult]:
            read = self._readers.start(self._store.get_many, keys)
            return outcome(read, until, f"read from {self._store!r}")

        own = [block._replace(keys=block.keys[:1]) for block in blocks]
        kept, _ = find_blocks(own, self._kept.get_many, self._outline)
        absent = [block for block, kv in zip(blocks, kept, strict=True) if kv is None]
        stored, errors = find_blocks(absent, get_many, self._outline)
        pairs = zip([*blocks, *absent], [*kept, *stored], strict=True)
        found = {block.place: kv for block, kv in pairs if kv is not None}
        if missing := [block for block in absent if block.place not in found]:
            raise _failure(missing, errors)
        return found


def _not_loaded(blocks: Sequence[BlockId], why: object) -> LoadError:
    places = tuple(block.place for block in blocks)
    return LoadError(f"The blocks of the prompt were not loaded: {why}", places)


def _failure(missing: Sequence[BlockId], errors: Mapping[str, StoreError]) -> LoadError:
    first = missing[0]
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    absence = "not found in any reachable store"
    if not first.keep.is_stored:
        absence = "found neither in a reachable store nor in memory (private_memory)"
    reasons = [absence, *(str(errors[key]) for key in first.keys if key in errors)]
    keys = dict.fromkeys(key for block in missing for key in block.keys)
    return LoadError(
        f"Block {first.place} of the prompt ({len(first.ids)} tokens from index {first.start})"
        f"{others} cannot be loaded: {reasons[-1]}",
        tuple(block.place for block in missing),
        tuple(key for key in keys if is_damage(errors.get(key))),
    )
