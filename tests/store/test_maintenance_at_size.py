"""Looking after stores that are large, or far away: by parts, by age, without keeping names."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest

from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import (
    DirectoryStore,
    EntryInfo,
    LiveHandles,
    MaintainedStore,
    ObjectStore,
    Tally,
    describe_all,
    gc,
    verify,
)
from blockattn_rag.store.maintenance import MOST_NAMES
from tests.store.conftest import objects_in_memory
from tests.store.kvs import make_kv
from tests.store.servers import HAS_MOTO

KV = [make_kv(f"passage {i}") for i in range(12)]


@pytest.fixture(params=["directory", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> MaintainedStore:
    """Twelve entries, just written."""
    opened = DirectoryStore(tmp_path) if request.param == "directory" else objects_in_memory()
    for kv in KV:
        opened.put(kv.key, kv)
    return opened


def damage(store: MaintainedStore, kv: BlockKV) -> None:
    """Flip the last bit of an entry."""
    if isinstance(store, DirectoryStore):
        path = store.entry_path(kv.key)
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif isinstance(store, ObjectStore):
        name, backend = f"objects/{kv.key[:2]}/{kv.key}.safetensors", store._client._backend
        content = bytes(backend.get(name).bytes())
        backend.put(name, content[:-1] + bytes([content[-1] ^ 1]))


def test_damage_is_found_and_deleted_in_stores_of_each_kind(store: MaintainedStore) -> None:
    damage(store, KV[3])
    found: list[str] = []
    report = verify(store, found=lambda key, why: found.append(f"{key}: {why}"))
    assert (report.ok, report.damaged.count, report.unread.count) == (11, 1, 0)
    assert list(report.damaged.first) == [KV[3].key]
    assert len(found) == 1
    assert "checksum" in found[0]
    assert verify(store, delete_damaged=True).deleted == 1
    assert sorted(store.keys()) == sorted(kv.key for kv in KV if kv is not KV[3])


def test_gc_sweeps_stores_of_each_kind(store: MaintainedStore) -> None:
    live = LiveHandles(kv.handle for kv in KV[:5])
    young, seen, gone = gc(store, live), list[int](), list[str]()
    assert (young.kept, young.kept_young, young.deleted.count) == (5, 7, 0)
    told = gc(store, live, grace_s=0, dry_run=True)
    assert (told.deleted.count, len(list(store.keys()))) == (7, 12)
    done = gc(store, live, seen.append, grace_s=0, deleted=gone.append)
    assert (done.deleted, done.freed_bytes) == (told.deleted, told.freed_bytes)
    assert sorted(gone) == sorted(kv.key for kv in KV[5:])
    assert seen == list(range(1, 13))
    assert sorted(store.keys()) == sorted(kv.key for kv in KV[:5])


def test_samples_are_parts_that_are_all_together(store: MaintainedStore) -> None:
    damage(store, KV[0])
    reports = [verify(store, sample=0.25, seed=seed) for seed in range(4)]
    assert sum(report.ok + report.damaged.count for report in reports) == 12
    assert sum(report.damaged.count for report in reports) == 1
    assert all(report.skipped == 12 - report.ok - report.damaged.count for report in reports)
    assert sum(report.skipped for report in reports) == 36
    again = verify(store, sample=0.25, seed=5)
    assert again == reports[1]


@pytest.mark.parametrize("sample", [0.0, -0.5, 1.5, float("nan")])
def test_a_sample_that_is_no_share_is_refused(sample: float) -> None:
    with pytest.raises(ValueError, match="more than 0 and at most 1"):
        verify(objects_in_memory(), sample=sample)


def test_what_was_not_used_for_its_time_to_live_goes_though_it_is_referred_to(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path)
    for age_days, kv in enumerate(KV[:4]):
        store.put(kv.key, kv)
        used = time.time() - age_days * 86400
        os.utime(store.entry_path(kv.key), (used, used))
    live = {kv.handle for kv in KV[:3]}
    report = gc(store, live, ttl_s=1.5 * 86400)
    assert (report.kept, report.deleted.count, report.expired) == (2, 2, 1)
    assert report.deleted.first[KV[2].key] == "not used for ttl_s"
    by_age = gc(store, None, ttl_s=0.5 * 86400)
    assert (by_age.kept, list(by_age.deleted.first)) == (1, [KV[1].key])


def test_a_time_to_live_within_the_grace_period_is_refused() -> None:
    with pytest.raises(ValueError, match="shorter than the grace period"):
        gc(objects_in_memory(), set(), ttl_s=60)
    with pytest.raises(ValueError, match="expected live_handles or ttl_s"):
        gc(objects_in_memory(), None)


def test_an_object_written_anew_since_gc_looked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store, describe = objects_in_memory(), ObjectStore.describe
    store.put(KV[0].key, KV[0])

    def an_older_one(self: ObjectStore, key: str) -> EntryInfo | None:
        info = describe(self, key)
        assert info is not None
        return info._replace(used_ns=info.used_ns - 7200 * 10**9)

    monkeypatch.setattr(ObjectStore, "describe", an_older_one)
    report = gc(store, set())
    assert (report.deleted.count, report.kept, report.kept_young) == (0, 0, 0)
    assert KV[0].key in store


def test_a_report_names_the_first_and_counts_all() -> None:
    tally = Tally()
    for number in range(MOST_NAMES + 7):
        tally.add(str(number), "why")
    assert (tally.count, len(tally.first), list(tally.first)[-1]) == (107, 100, "99")


def test_entries_are_looked_at_as_they_are_listed_and_several_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a listing that never ends, a few are taken, and read at the same time."""
    store, waiting, listed = objects_in_memory(), threading.Barrier(8, timeout=10), list[str]()

    def endless(_self: ObjectStore):  # type: ignore[no-untyped-def]
        while True:
            listed.append(KV[0].key)
            yield KV[0].key

    def slow(_self: ObjectStore, _key: str) -> None:
        waiting.wait()

    monkeypatch.setattr(ObjectStore, "keys", endless)
    monkeypatch.setattr(ObjectStore, "describe", slow)
    entries = describe_all(store)
    assert [next(entries)[1] for _ in range(8)] == [None] * 8
    waiting.abort()
    assert len(listed) <= 50


@pytest.mark.skipif(not HAS_MOTO, reason="needs moto[server] and obstore")
def test_the_commands_look_after_a_bucket(s3: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from blockattn_rag.app.cli import app

    def run(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["store", *map(str, arguments)])
        return result.exit_code, result.stdout

    store = ObjectStore(s3)
    for kv in KV[:3]:
        store.put(kv.key, kv)
    damage(store, KV[2])
    live = tmp_path / "live"
    live.write_text(KV[0].handle + "\n", encoding="utf-8")
    assert re.search(r"^all +3 ", run("stats", s3)[1], re.MULTILINE)
    assert KV[1].handle in run("ls", s3, "--long")[1]
    status, shown = run("verify", s3)
    assert (status, KV[2].key in shown) == (1, True)
    assert run("verify", s3, "--delete")[0] == 0
    assert "kept 1 referred to and 1 used" in run("gc", s3, "--handles", live)[1]
    time.sleep(1.1)  # the server tells times by the second
    assert "deleted 1 entry" in run("gc", s3, "--handles", live, "--grace", "0")[1]
    assert list(store.keys()) == [KV[0].key]
