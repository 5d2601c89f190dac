"""Background updates of a server's passage index."""

from __future__ import annotations

import asyncio

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.prompts.recognition import Entries, entries_of
from blockattn_rag.server.vllm.indexing import IndexWriter
from blockattn_rag.store import MemoryStore
from blockattn_rag.store.passage_index import PassageIndex, folder_of

ENTRIES = [entries_of([f"Passage {n} of a busy server, with enough characters."]) for n in range(6)]


def add_all(index: PassageIndex, *namespaces: str) -> int:
    """Add entries one by one. Returns the number of failed writes."""
    failures: list[bool] = []

    async def run() -> None:
        writer = IndexWriter(index, lambda: failures.append(True), every_s=3600)
        for entries in ENTRIES:
            for namespace in namespaces:
                writer.add(entries, namespace)
            await asyncio.sleep(0.01)

    asyncio.run(run())
    return len(failures)


def test_entries_are_written_in_few_files_and_completely_at_exit() -> None:
    store = MemoryStore(1 << 20)
    add_all(PassageIndex(store), "a", "b")
    for namespace in ("a", "b"):
        assert 1 <= len(store.sidecar.names(folder_of(namespace))) <= 2
        assert [PassageIndex(store).add(one, namespace) for one in ENTRIES] == [0] * 6


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (StoreError, "Cannot write the passage index: {} is full"),
        (MemoryError, "Unexpected error while writing the index: {} is full"),
    ],
)
def test_a_failed_write_is_logged_counted_and_retried(
    kind: type[Exception],
    message: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing, add = ["a", "b"], PassageIndex.add

    def add_or_fail(index: PassageIndex, entries: Entries, namespace: str) -> int:
        if namespace in failing:
            failing.remove(namespace)
            raise kind(f"{namespace} is full")
        return add(index, entries, namespace)

    monkeypatch.setattr(PassageIndex, "add", add_or_fail)
    store = MemoryStore(1 << 20)
    assert add_all(PassageIndex(store), "a", "b") == 2
    for namespace in ("a", "b"):
        assert message.format(namespace) in caplog.text
        assert [PassageIndex(store).add(one, namespace) for one in ENTRIES] == [0] * 6
