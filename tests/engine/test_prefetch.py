"""Prefetching: what is read, when, and that nothing of it reaches the caller."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.engine import fetcher, prefetch
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.prefetch import Prefetcher, PrefetchStats
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model import BlockModel
from blockattn_rag.store import DirectoryStore

A, B, Q = "Halden Tower is 214 metres tall.", "It was built in 1931.", "How tall?"


class GatedStore(DirectoryStore):
    """A store whose reads wait for ``gate``; ``asked`` are the keys that were read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[str] = []

    def get(self, key: str) -> BlockKV | None:
        self.asked.append(key)
        assert self.gate.wait(20)
        return super().get(key)


@pytest.fixture
def store(model: BlockModel, tmp_path: Path) -> GatedStore:
    """Holds A, and not B."""
    store = GatedStore(tmp_path / "kv")
    BlockAttentionEngine(model, store, resident_bytes=0).encode([A])
    store.asked.clear()
    return store


def wait_for(condition: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.005)


def test_prefetched_blocks_are_not_read_again(model: BlockModel, store: GatedStore) -> None:
    engine = BlockAttentionEngine(model, store)
    engine.prefetch([A, B])
    wait_for(lambda: engine.prefetches == PrefetchStats(ready=1, absent=1))
    [of_a, of_b] = store.asked
    stats = engine.generate(["x", A, B, Q], max_new_tokens=1).stats
    assert (stats.hits, stats.misses) == (1, 2)  # "x" and B
    assert store.asked.count(of_a) == 1
    assert store.asked.count(of_b) == 2


def test_answer_waits_for_hanging_prefetch(model: BlockModel, store: GatedStore) -> None:
    engine = BlockAttentionEngine(model, store)
    store.gate.clear()
    engine.prefetch([A])
    wait_for(lambda: store.asked)
    pending = engine.submit(["x", A, Q], max_new_tokens=1)
    wait_for(lambda: len(store.asked) == 2)  # "x"; A is being read
    store.gate.set()
    assert pending.result(20).stats.hits == 1
    assert len(store.asked) == 2


def test_nothing_is_computed_or_stored(model: BlockModel, store: GatedStore) -> None:
    engine = BlockAttentionEngine(model, store)
    engine.prefetch([B])
    wait_for(lambda: engine.prefetches.absent)
    assert store.stats().entries == 1


def test_what_would_push_out_the_passages_before_it_is_not_read(
    model: BlockModel, store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher, "_PREFETCHED_AT_ONCE", 2)
    texts = [f"Passage {i}." for i in range(7)]
    BlockAttentionEngine(model, store, resident_bytes=0).encode(texts)
    of_one = min(kv.nbytes for key in [*store.keys()] if (kv := store.peek(key)))
    store.asked.clear()
    engine = BlockAttentionEngine(model, store, resident_bytes=4 * of_one)
    engine.prefetch([*texts, texts[6]])
    wait_for(lambda: engine.prefetches == PrefetchStats(ready=4, dropped=4))
    assert len(store.asked) == 4


@pytest.mark.parametrize("passages", [[""], [None], [3], "text", []])
def test_invalid_passages_do_not_raise(model: BlockModel, store: GatedStore, passages: Any) -> None:
    engine = BlockAttentionEngine(model, store)
    engine.prefetch(passages)
    engine.prefetch([A])
    wait_for(lambda: engine.prefetches.ready == 1)
    assert engine.prefetches.failed == sum(one in (None, 3) for one in passages)


def test_prefetch_depends_on_the_recipe(model: BlockModel, store: GatedStore) -> None:
    engine = BlockAttentionEngine(model, store)
    engine.prefetch([A], recipe="head:2")
    wait_for(lambda: engine.prefetches == PrefetchStats(absent=1))
    engine.prefetch([A])
    wait_for(lambda: engine.prefetches == PrefetchStats(ready=1, absent=1))


def test_what_fails_is_counted_logged_once_and_raised_to_nobody(
    model: BlockModel, store: GatedStore, caplog: pytest.LogCaptureFixture
) -> None:
    engine = BlockAttentionEngine(model, store)
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        engine.prefetch([A, B], recipe="no such recipe")
        wait_for(lambda: engine.prefetches.failed == 2)
        engine.prefetch([A], recipe="no such recipe")
        wait_for(lambda: engine.prefetches.failed == 3)
    [record] = [one for one in caplog.records if "Prefetching failed" in one.message]
    assert "no such recipe" in record.message
    engine.prefetch([A])  # the thread goes on
    wait_for(lambda: engine.prefetches.ready == 1)


def test_excess_calls_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "MOST_WAITING", 2)
    prefetcher, gate, begun = Prefetcher(), threading.Event(), threading.Event()

    def read() -> PrefetchStats:
        begun.set()
        assert gate.wait(20)
        return PrefetchStats(ready=1, absent=2)

    prefetcher.submit(1, read)
    assert begun.wait(20)
    for _ in range(4):
        prefetcher.submit(3, read)
    assert prefetcher.stats == PrefetchStats(dropped=6)
    gate.set()
    wait_for(lambda: prefetcher.stats == PrefetchStats(ready=3, absent=6, dropped=6))


def test_the_thread_ends_when_nothing_waits() -> None:
    prefetcher = Prefetcher()

    def threads() -> Sequence[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "blockattn-prefetch"]

    for ready in (1, 2):
        prefetcher.submit(1, lambda: PrefetchStats(ready=1))
        wait_for(lambda: prefetcher.stats.ready == ready)  # noqa: B023 -- called at once
        wait_for(lambda: not threads())


def test_a_system_without_threads_is_no_reason_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    prefetcher = Prefetcher()
    with monkeypatch.context() as patch:
        patch.setattr(prefetch, "start_thread", refuse)
        prefetcher.submit(2, lambda: PrefetchStats(ready=2))
    assert prefetcher.stats == PrefetchStats(failed=2)
    prefetcher.submit(2, lambda: PrefetchStats(ready=2))
    wait_for(lambda: prefetcher.stats.ready == 2)
