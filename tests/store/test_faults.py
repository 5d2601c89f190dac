"""ObjectStore on a faulty server: no read returns a wrong block or exceeds its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.store import MemoryStore, ObjectStore, TieredStore
from tests.store.faults import Fault, campaign, faulty
from tests.store.kvs import make_kv, same

DEADLINE_S = 2.0
# Allows for threads that wake up late on a busy machine. A hang would take 30 s.
LATE_S = DEADLINE_S + 4.0
ALL: dict[Fault, float] = {
    "503": 0.05, "truncated": 0.03, "other bytes": 0.03, "other range": 0.03, "flipped bit": 0.03,
    "slow": 0.03, "hangs": 0.002, "hangs within": 0.002,
}  # fmt: skip
KVS = [make_kv(f"passage {i}", tokens=20 + 5 * i) for i in range(16)]
READS = 128
Open = Callable[..., ObjectStore]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split entries into several parts, each of which can fail."""
    monkeypatch.setattr("blockattn_rag.store.object_client._PART_BYTES", 6000)


@pytest.fixture
def empty(s3: str, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Function that opens an empty store on the server with a URL."""

    def opened(url: str, retries: int = 3, deadline_s: float = DEADLINE_S) -> ObjectStore:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        return ObjectStore(s3, deadline_s=deadline_s, retries=retries, parallel=32)

    return opened


@pytest.fixture
def filled(s3: str, empty: Open) -> Open:
    """Function that opens a store that contains all blocks."""
    store = ObjectStore(s3)
    for kv in KVS:
        store.put(kv.key, kv)
    return empty


@pytest.mark.parametrize("fault", ["503", "truncated", "other range", "hangs", "hangs within"])
def test_faults_are_reported_before_the_deadline(filled: Open, s3_url: str, fault: Fault) -> None:
    with faulty(s3_url, {fault: 1.0}) as server:
        store = filled(server.url, deadline_s=0.5)
        started = time.monotonic()
        with pytest.raises(StoreError, match="Cannot read s3://bucket/store-") as told:
            store.get(KVS[0].key)
        assert time.monotonic() - started < LATE_S
        assert not isinstance(told.value, CorruptEntryError)


@pytest.mark.parametrize("fault", ["other bytes", "flipped bit"])
def test_wrong_bytes_are_detected(filled: Open, s3_url: str, fault: Fault) -> None:
    with faulty(s3_url, {fault: 1.0}) as server, pytest.raises(StoreError):
        filled(server.url).get(KVS[0].key)


def test_retries_after_a_fault(empty: Open, s3_url: str) -> None:
    with faulty(s3_url, {"503": 0.3}) as server:
        store = empty(server.url, retries=8)
        for kv in KVS[:5]:
            store.put(kv.key, kv)
            assert same(store.get(kv.key), kv)
        assert server.made["503"] > 0


def test_reads_of_a_faulty_server_are_never_wrong(filled: Open, s3_url: str) -> None:
    with faulty(s3_url, ALL) as server:
        store = filled(server.url)
        outcomes = campaign(store, KVS, reads=READS, late_s=LATE_S)
    assert outcomes["reads"] == READS
    assert (outcomes["wrong"], outcomes["late"]) == (0, 0)
    assert outcomes["found"] > 0
    assert outcomes["failed"] > 0
    assert outcomes["written"] > 0


def test_tiers_answer_reads_despite_faults_of_the_home_store(
    filled: Open, s3_url: str, tmp_path: Path
) -> None:
    with faulty(s3_url, ALL | {"hangs": 0.02}) as server:
        home = filled(server.url)
        near = MemoryStore(4 * KVS[0].nbytes)
        store = TieredStore(near, tmp_path / "kv", home, pause_s=0.2)
        outcomes = campaign(store, KVS, reads=READS, late_s=4 * LATE_S)
    assert outcomes["reads"] == READS
    assert (outcomes["wrong"], outcomes["late"]) == (0, 0)
    assert outcomes["found"] > 0
