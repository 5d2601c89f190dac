"""Writes that are made behind whoever asked for them, within a bound of memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import check_max_bytes
from blockattn_rag.store.forks import renew_in_child

_THREADS = 4


@dataclass(frozen=True, slots=True, eq=False)
class _Write:
    """A write that waits, or is being made."""

    kv: BlockKV
    write: Callable[[str, BlockKV], object]


class WriteQueue:
    """Writes blocks in threads of its own. What it took is written before the process ends, if
    that ends normally.

    Args:
        max_bytes: of the blocks that wait, at most; a single one may be larger.
    """

    def __init__(self, max_bytes: int) -> None:
        check_max_bytes(max_bytes)
        self._max_bytes = max_bytes
        self._closed = False
        self.renew()
        renew_in_child(self)

    def renew(self) -> None:
        """Forget what waits, which the process writes that a forked one comes from."""
        self._changed = threading.Condition()
        self._waiting: dict[str, _Write] = {}
        self._being_made: set[str] = set()
        self._bytes = 0
        # Its threads are waited for when the interpreter ends, and make all that they were given.
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blockattn-rag-writes")

    def add(
        self,
        key: str,
        kv: BlockKV,
        write: Callable[[str, BlockKV], object],
        wait_s: float = 0.0,
        *,
        unless_waiting: bool = False,
    ) -> bool:
        """Have ``write(key, kv)`` called soon, in the place of a write of this key that waits.

        Args:
            write: must not raise.
            wait_s: seconds to wait for room.
            unless_waiting: leave a write of this key that waits in its place, and add none.

        Returns:
            False if there was no room in time, or the queue is closed: nothing will be written.
        """
        kv = kv.to(torch.device("cpu"))
        asked = _Write(kv, write)
        with self._changed:
            if unless_waiting and key in self._waiting:
                return True
            self._changed.wait_for(lambda: self._closed or self._has_room(kv.nbytes), wait_s)
            if self._closed or not self._has_room(kv.nbytes):
                return False
            try:
                self._threads.submit(self._make, key, asked)
            except RuntimeError:  # the interpreter ends
                return False
            self._waiting[key] = asked
            self._bytes += kv.nbytes
        return True

    def pending(self, key: str) -> BlockKV | None:
        """A block that waits to be written, or is being written."""
        with self._changed:
            write = self._waiting.get(key)
            return None if write is None else write.kv

    def discard(self, key: str) -> bool:
        """Do not write a block that waits; True if there was one."""
        with self._changed:
            return self._waiting.pop(key, None) is not None

    def flush(self, wait_s: float | None = None) -> bool:
        """Wait until all is written, for ``wait_s`` at most; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._bytes, wait_s)

    @property
    def is_closed(self) -> bool:
        """Whether it takes no more."""
        return self._closed

    def close(self) -> None:
        """Write what waits, and take no more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=True)

    def _has_room(self, nbytes: int) -> bool:
        return self._bytes == 0 or self._bytes + nbytes <= self._max_bytes

    def _make(self, key: str, asked: _Write) -> None:
        with self._changed:
            # One at a time: an older write that ends last would undo a newer one.
            self._changed.wait_for(lambda: key not in self._being_made)
            self._being_made.add(key)
            is_wanted = self._waiting.get(key) is asked
        try:
            if is_wanted:
                asked.write(key, asked.kv)
        finally:
            with self._changed:
                self._being_made.discard(key)
                self._bytes -= asked.kv.nbytes
                if self._waiting.get(key) is asked:
                    del self._waiting[key]
                self._changed.notify_all()
