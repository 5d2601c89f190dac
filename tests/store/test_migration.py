"""Stores of format version 1 become stores of today, and nothing that was computed is lost."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV, token_digest
from blockattn_rag.model import BlockModel
from blockattn_rag.store import DirectoryStore, MemoryStore, migrate, verify, version_1
from blockattn_rag.store.files import read_whole
from blockattn_rag.store.header import FormatError
from tests.models import shared_tiny_llama, tiny_tokenizer
from tests.store import version_1 as old
from tests.store.kvs import kvs, make_kv, same
from tests.store.writers import PROCESSES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of version 1 with five entries."""
    for number in range(5):
        old.put(tmp_path / "kv", old.passage(number))
    return tmp_path / "kv"


def holds(store: DirectoryStore, kv: BlockKV) -> bool:
    expected = old.migrated(kv)
    found = store.get(expected.key)
    return found is not None and same(found, expected)


@given(kvs())
@settings(deadline=None)
def test_what_version_1_wrote_is_read(kv: BlockKV) -> None:
    kv = replace(kv, namespace="")
    raw = torch.frombuffer(bytearray(old.encode(kv)), dtype=torch.uint8)
    assert version_1.is_version_1(raw[: version_1.HEAD_BYTES].numpy().tobytes())
    key, found = version_1.decode(raw)
    assert same(found, old.migrated(kv))
    assert len(key) == 64


def test_damage_of_an_old_entry_is_found() -> None:
    content = old.encode(make_kv())
    for position in range(8, len(content), 7):
        damaged = bytearray(content)
        damaged[position] ^= 4
        with pytest.raises(FormatError):
            version_1.decode(torch.frombuffer(damaged, dtype=torch.uint8))


def test_an_old_store_is_refused_with_the_advice_that_helps(folder: Path) -> None:
    with pytest.raises(StoreError, match=f"store migrate {folder}"):
        DirectoryStore(folder)
    migrate(folder, all_plain=True)
    assert verify(DirectoryStore(folder)).ok == 5


def test_every_entry_is_found_under_its_token_ids_and_used_when_it_was(folder: Path) -> None:
    paths = sorted(folder.rglob("*.safetensors"))
    for number, path in enumerate(paths):
        os.utime(path, (1000 + number, 1000 + number))
    seen: list[tuple[int, int]] = []
    report = migrate(folder, all_plain=True, progress=lambda *at: seen.append(at))
    assert (report.migrated, report.same, report.dropped, report.errors) == (5, 0, 0, ())
    assert seen[-1] == (len(seen), len(seen))
    store = DirectoryStore(folder)
    assert {entry.used_ns for entry in store.entries()} == {
        (1000 + number) * 10**9 for number in range(5)
    }
    assert all(holds(store, old.passage(number)) for number in range(5))
    assert not any(path.exists() for path in paths)
    assert {path.stat().st_mode & 0o777 for path in store.path.rglob("*.safetensors")} == {0o600}


def test_an_engine_reuses_what_was_migrated(tmp_path: Path) -> None:
    model = BlockModel(shared_tiny_llama(), tiny_tokenizer())
    memory = MemoryStore(1 << 26)
    texts = ["first passage", "second"]
    BlockAttentionEngine(model, memory, recipe="none").encode(texts)
    for key in list(memory.keys()):
        kv = memory.get(key)
        assert kv is not None
        old.put(tmp_path / "kv", replace(kv, digest=f"of the text {key}"))
    migrate(tmp_path / "kv", all_plain=True)
    engine = BlockAttentionEngine(model, tmp_path / "kv", recipe="none", on_miss="error")
    stats = engine.generate([*texts, "question?"], max_new_tokens=1, on_miss="compute").stats
    assert (stats.hits, stats.misses) == (1, 1)  # the first one has no BOS in the store
    fresh = BlockAttentionEngine(model, memory, recipe="none")
    expected = fresh.answer_logits([*texts, "question?"], [3])
    assert torch.equal(engine.answer_logits([*texts, "question?"], [3]), expected)


def test_a_store_of_today_is_left_as_it_is(folder: Path) -> None:
    migrate(folder, all_plain=True)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}
    for all_plain in (True, False):
        report = migrate(folder, all_plain=all_plain)
        assert (report.migrated, report.dropped) == (0, 0)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")} == before


def test_a_dry_run_tells_and_changes_nothing(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for all_plain in (True, False):
        report = migrate(folder, all_plain=all_plain, dry_run=True)
        assert (report.migrated, report.dropped) == ((5, 0) if all_plain else (0, 5))
        assert report.dry_run
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_texts_of_the_same_tokens_become_one_entry(folder: Path) -> None:
    old.put(folder, replace(old.passage(0), digest="another template, the same tokens"))
    report = migrate(folder, all_plain=True)
    assert (report.migrated, report.same) == (5, 1)
    assert DirectoryStore(folder).stats().entries == 5


def test_entries_that_may_follow_a_sink_are_given_up_where_nobody_knows(folder: Path) -> None:
    report = migrate(folder, all_plain=False)
    assert (report.migrated, report.dropped) == (0, 5)
    assert DirectoryStore(folder).stats().entries == 0


def test_other_keys_and_values_of_the_same_tokens_show_that_there_are_sinks(folder: Path) -> None:
    plain = old.passage(0)
    after_a_sink = replace(plain, keys=tuple(k.flip(0) for k in plain.keys), digest="after a sink")
    old.put(folder, after_a_sink)
    with pytest.raises(StoreError, match=r"encoded after a sink or corrected.*migrate --drop"):
        migrate(folder, all_plain=True)
    with pytest.raises(StoreError, match="store migrate"):
        DirectoryStore(folder)
    assert migrate(folder, all_plain=False).dropped >= 5  # with what was migrated before
    assert DirectoryStore(folder).stats().entries == 0


def test_damaged_and_misplaced_entries_are_deleted_and_named(folder: Path) -> None:
    first, second, *_ = sorted(folder.rglob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-3])
    misplaced = second.with_name("0" * 64 + ".safetensors")
    misplaced.parent.parent.joinpath("00").mkdir(exist_ok=True)
    misplaced = second.parent.parent / "00" / misplaced.name
    misplaced.write_bytes(second.read_bytes())
    report = migrate(folder, all_plain=True)
    assert (report.migrated, {path for path, _ in report.damaged}) == (
        4,
        {str(first), str(misplaced)},
    )
    assert any("another key" in reason for _, reason in report.damaged)
    assert verify(DirectoryStore(folder)).ok == 4


def test_what_cannot_be_read_stays_and_is_told_and_the_store_stays_old(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def no_memory(file: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(12, "no memory for it")
        return read_whole(file)  # type: ignore[arg-type]

    monkeypatch.setattr("blockattn_rag.store.files.read_whole", no_memory)
    report = migrate(folder, all_plain=True)
    assert (report.migrated, len(report.errors)) == (4, 1)
    assert "no memory for it" in report.errors[0]
    with pytest.raises(StoreError, match="store migrate"):
        DirectoryStore(folder)
    monkeypatch.undo()
    assert migrate(folder, all_plain=True).migrated == 1
    assert DirectoryStore(folder).stats().entries == 5


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not readable JSON"):
        migrate(tmp_path, all_plain=True)
    (tmp_path / "format.json").write_text('{"format": "other"}')
    with pytest.raises(StoreError, match="no store of version 1"):
        migrate(tmp_path, all_plain=True)


def test_a_migration_killed_twenty_times_loses_nothing(tmp_path: Path) -> None:
    folder, passages = tmp_path / "kv", [old.passage(number) for number in range(150)]
    for kv in passages:
        old.put(folder, kv)
    killer = PROCESSES.Process(target=old.kill, args=(folder, 20))
    killer.start()
    killer.join()
    assert killer.exitcode == 0
    report = migrate(folder, all_plain=True)
    assert report.damaged == ()
    store = DirectoryStore(folder)
    assert all(holds(store, kv) for kv in passages)
    assert store.stats().entries == len(passages)


@pytest.mark.parametrize("step", ["fsync", "replace", "unlink"])
def test_a_migration_that_dies_at_any_step_is_finished_by_the_next(folder: Path, step: str) -> None:
    worker = PROCESSES.Process(target=old.die_at, args=(folder, step))
    worker.start()
    worker.join()
    assert worker.exitcode == -signal.SIGKILL
    assert len(found_old(folder)) == 5
    report = migrate(folder, all_plain=True)
    assert report.migrated + report.same == 5
    store = DirectoryStore(folder)
    assert all(holds(store, old.passage(number)) for number in range(5))
    assert store.stats().entries == 5


def found_old(folder: Path) -> list[Path]:
    paths = folder.rglob("*.safetensors")
    return [p for p in paths if version_1.is_version_1(p.read_bytes()[: version_1.HEAD_BYTES])]


def test_the_digest_of_a_migrated_entry_is_that_of_its_tokens(folder: Path) -> None:
    migrate(folder, all_plain=True)
    store = DirectoryStore(folder)
    for key in list(store.keys()):
        info, kv = store.describe(key), store.get(key)
        assert info is not None
        assert kv is not None
        assert info.digest == token_digest(kv.token_ids.tolist())
    assert store.stats().entries == 5
