"""Background writes of the passages of answered requests to the passage index."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from blockattn_rag.errors import StoreError
from blockattn_rag.prompts.recognition import Entries, joined
from blockattn_rag.store.passage_index import PassageIndex

logger = logging.getLogger("blockattn_rag")

_MOST_UNWRITTEN = 1 << 16  # Entries per namespace, 36 bytes each.


class IndexWriter:
    """Collects index entries, and writes one file per namespace every few seconds.

    Answers do not wait for the index. A failed write is logged, and retried with the next write in
    its namespace. The remaining entries are written when the event loop ends.
    """

    def __init__(
        self, index: PassageIndex, on_failure: Callable[[], None], *, every_s: float = 5.0
    ) -> None:
        self._index = index
        self._on_failure = on_failure
        self._every_s = every_s
        self._collected: dict[str, list[Entries]] = {}
        self._unwritten: dict[str, list[Entries]] = {}
        self._task: asyncio.Task[None] | None = None
        self._writing = threading.Lock()

    def add(self, entries: Entries, namespace: str) -> None:
        """Schedule a write of entries. Call it in the event loop, after storing the passages."""
        if len(entries):
            self._collected.setdefault(namespace, []).append(entries)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._collected:
                collected, self._collected = self._collected, {}
                await asyncio.to_thread(self._write, collected)
                await asyncio.sleep(self._every_s)
        except asyncio.CancelledError:
            self._write({name: [] for name in self._unwritten} | self._collected)
            raise

    def _write(self, collected: dict[str, list[Entries]]) -> None:
        with self._writing:  # The thread of a canceled task continues to run.
            for namespace, parts in collected.items():
                entries = joined([*parts, *self._unwritten.pop(namespace, ())])
                try:
                    self._index.add(entries, namespace)
                except Exception as error:  # Other namespaces must still be written.
                    self._unwritten[namespace] = [entries[:_MOST_UNWRITTEN]]
                    self._on_failure()
                    if isinstance(error, StoreError):
                        logger.warning("Cannot write the passage index: %s", error)
                    else:
                        logger.exception("Unexpected error while writing the index: %s", error)
