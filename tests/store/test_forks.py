"""Forked processes: threads of a store that the parent has and the child lacks."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.store import DirectoryStore, TieredStore
from blockattn_rag.store.concurrency import SingleFlight
from blockattn_rag.store.objects import ObjectStore
from tests.holding import LONGEST_S
from tests.store.kvs import make_kv, same

FORK = multiprocessing.get_context("fork")
KV, OTHER = make_kv("one"), make_kv("other")


def passes_in_a_child(work: Callable[[], None]) -> bool:
    child = FORK.Process(target=work)
    child.start()
    child.join(LONGEST_S)
    child.kill()
    return child.exitcode == 0


@pytest.fixture
def held_reads() -> Iterator[SingleFlight]:
    """A read of KV is going on in another thread, and does not end while the test runs."""
    flights, begun, go = SingleFlight(), threading.Event(), threading.Event()

    def read(_keys: object) -> list[None]:
        begun.set()
        go.wait(LONGEST_S)
        return [None]

    reader = threading.Thread(target=flights.read, args=([KV.key], read, LONGEST_S))
    reader.start()
    begun.wait(LONGEST_S)
    yield flights
    go.set()
    reader.join()


def test_a_forked_process_writes_behind_and_reads(tmp_path: Path) -> None:
    home = DirectoryStore(tmp_path / "home")
    tiers = TieredStore(DirectoryStore(tmp_path / "near"), home, write="behind", deadline_s=3)
    tiers.put(KV.key, KV)
    assert tiers.flush(LONGEST_S)

    def work() -> None:
        found = tiers.get(KV.key)
        assert found is not None
        assert same(found, KV)
        tiers.put(OTHER.key, OTHER)
        assert tiers.flush(5)

    assert passes_in_a_child(work)
    assert set(home.keys()) == {KV.key, OTHER.key}


def test_a_forked_process_does_not_wait_for_its_parents_reads(held_reads: SingleFlight) -> None:
    def work() -> None:
        (found,) = held_reads.read([KV.key], lambda _keys: [KV], 1.0)
        assert found is KV

    assert passes_in_a_child(work)


def test_an_object_store_that_was_used_before_a_fork_says_so_and_does_not_hang() -> None:
    obstore = pytest.importorskip("obstore.store")
    store = ObjectStore("memory://kv", backend=obstore.MemoryStore(), deadline_s=LONGEST_S)
    store.put(KV.key, KV)

    def work() -> None:
        uses: list[Callable[[], object]] = [
            lambda: store.get(KV.key),
            lambda: store.put(KV.key, KV),
            lambda: store.delete(KV.key),
            store.stats,
        ]
        for use in uses:
            with pytest.raises(StoreError, match="start processes by 'spawn' or 'forkserver'"):
                use()

    assert passes_in_a_child(work)
    assert store.get(KV.key) is not None
