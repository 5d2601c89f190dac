"""Forked processes, in which the threads of the parent's stores do not exist."""

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
    """Single flight with a read of KV in another thread, in progress until the test ends."""
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


def test_forked_process_reads_and_writes_tiers(tmp_path: Path) -> None:
    home = DirectoryStore(tmp_path / "home")
    near = DirectoryStore(tmp_path / "near")
    tiers = TieredStore(near, home, deadline_s=3)
    tiers.put(KV.key, KV)
    assert tiers.flush(LONGEST_S)

    def work() -> None:
        assert same(tiers.get(KV.key), KV)
        tiers.put(OTHER.key, OTHER)
        assert tiers.flush(5)

    assert passes_in_a_child(work)
    assert set(home.keys()) == set(near.keys()) == {KV.key, OTHER.key}


def test_forked_process_does_not_join_reads_of_its_parent(held_reads: SingleFlight) -> None:
    def work() -> None:
        (found,) = held_reads.read([KV.key], lambda _keys: [KV], 1.0)
        assert found is KV

    assert passes_in_a_child(work)


def test_object_store_used_before_a_fork_raises() -> None:
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
            with pytest.raises(StoreError, match="use the start method 'spawn' or 'forkserver'"):
                use()

    assert passes_in_a_child(work)
    assert store.get(KV.key) is not None
