"""The passage index in stores."""

from __future__ import annotations

import pickle
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.prompts.blocks import Span, handle_of
from blockattn_rag.prompts.recognition import entries_of
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore
from blockattn_rag.store.namespaces import OPEN, Access
from blockattn_rag.store.passage_index import IndexReport, PassageIndex, folder_of, merge_index
from tests.store.conftest import objects_in_memory, opened
from tests.store.kvs import make_kv

TEXTS = [f"Passage {n} of the index, which has enough characters: {n}." for n in range(8)]


@pytest.fixture(params=["memory", "directory", "objects", "s3", "tiers"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    return opened(request, tmp_path)


def found(index: PassageIndex, *texts: str, access: Access = OPEN) -> list[str]:
    spans = index.split([Span("\n\n".join(texts), "conversation")], access)
    return [span.text for span in spans if span.origin == "passage"]


def add(index: PassageIndex, *texts: str, namespace: str = "") -> int:
    return index.add(entries_of(texts), namespace)


def test_added_passages_are_found_by_other_indexes(store: KVStore) -> None:
    assert add(PassageIndex(store), *TEXTS[:3]) == 3
    index = PassageIndex(store, refresh_s=0)
    assert found(index, *TEXTS) == TEXTS[:3]
    assert add(PassageIndex(store), *TEXTS[2:5]) == 2
    assert found(index, *TEXTS) == TEXTS[:5]


def test_index_is_read_once_per_refresh_time(store: KVStore) -> None:
    index = PassageIndex(store, refresh_s=3600)
    assert found(index, *TEXTS) == []
    add(PassageIndex(store), TEXTS[0])
    assert found(index, *TEXTS) == []
    add(index, TEXTS[1])
    assert found(index, *TEXTS) == [TEXTS[1]]


def test_split_waits_for_new_files(store: KVStore) -> None:
    index = PassageIndex(store, refresh_s=0.01, in_background=True)
    assert found(index, *TEXTS) == []
    add(PassageIndex(store), *TEXTS)
    time.sleep(0.02)
    assert found(index, *TEXTS) == TEXTS


def test_background_read_delays_no_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, may_read = DirectoryStore(tmp_path), threading.Event()
    index = PassageIndex(store, refresh_s=0, in_background=True)
    names = index.sidecar.names
    monkeypatch.setattr(index.sidecar, "names", lambda at: names(at) if may_read.wait(60) else [])
    add(PassageIndex(store), *TEXTS)
    assert found(index, *TEXTS) == []
    may_read.set()
    until = time.monotonic() + 60
    while found(index, *TEXTS) != TEXTS:
        assert time.monotonic() < until, "the index was not read"
        time.sleep(0.01)
    may_read.clear()
    assert found(index, *TEXTS) == TEXTS
    may_read.set()


def test_only_readable_namespaces_are_searched(store: KVStore) -> None:
    index = PassageIndex(store)
    names = ["", "tenant", "Tenant", "public"]
    for text, name in zip(TEXTS, names, strict=False):
        add(index, text, namespace=name)
    for text, name in zip(TEXTS, names, strict=False):
        assert found(index, *TEXTS, access=Access(name)) == [text]
    access = Access("tenant", ["public"])
    assert found(index, *TEXTS, access=access) == [TEXTS[1], TEXTS[3]]


def test_concurrent_writers_lose_nothing(store: KVStore) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda text: add(PassageIndex(store), text), TEXTS))
    assert found(PassageIndex(store), *TEXTS) == TEXTS


def test_store_without_a_sidecar_is_refused() -> None:
    class Plain(MemoryStore):
        sidecar = None  # type: ignore[assignment]

    with pytest.raises(ValueError, match="cannot store a passage index: use a folder"):
        PassageIndex(Plain(1))


def files_of(store: DirectoryStore, namespace: str = "") -> list[Path]:
    return sorted((store.path / "sidecar" / folder_of(namespace)).iterdir())


def test_damaged_file_counts_as_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = DirectoryStore(tmp_path)
    add(PassageIndex(store), TEXTS[0])
    add(PassageIndex(store), TEXTS[1])
    damaged = files_of(store)[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert len(found(PassageIndex(store), *TEXTS)) == 1
    assert f"{damaged.name} is damaged" in caplog.text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StoreError("cannot list"), "Cannot read the passage index: cannot list"),
        (MemoryError("no room"), "Unexpected error while reading the passage index: no room"),
    ],
)
def test_an_unreadable_index_is_logged_and_known_passages_are_kept(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    store = DirectoryStore(tmp_path)
    index = PassageIndex(store, refresh_s=0)
    add(index, TEXTS[0])
    monkeypatch.setattr(type(store.sidecar), "names", Mock(side_effect=error))
    assert found(index, *TEXTS) == [TEXTS[0]]
    assert message in caplog.text


def test_index_files_are_private_and_not_entries(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "kv")
    kv = make_kv()
    store.put(kv.key, kv)
    add(PassageIndex(store), *TEXTS)
    (file,) = files_of(store)
    assert file.stat().st_mode & 0o777 == 0o600
    assert TEXTS[0].encode() not in file.read_bytes()
    assert [*store.keys()] == [kv.key]
    (store.path / "format.json").unlink()
    again = DirectoryStore(store.path)  # the index does not count as a foreign file
    assert found(PassageIndex(pickle.loads(pickle.dumps(again))), *TEXTS) == TEXTS


def test_temporary_index_files_are_leftovers(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    add(PassageIndex(store), TEXTS[0])
    (file,) = files_of(store)
    left = file.with_name(f".{file.name}.{'0' * 16}.tmp")
    left.write_bytes(b"half")
    assert [*store.leftovers()] == [left]
    assert found(PassageIndex(store), *TEXTS) == [TEXTS[0]]


# -- merging --------------------------------------------------------------------------------


def stored(store: KVStore, text: str, namespace: str = "", *, is_known: bool = True) -> str:
    """Store the entry of a passage and add it to the index. Returns its key."""
    kv = replace(make_kv(text), handle=handle_of(text) if is_known else "", namespace=namespace)
    store.put(kv.key, kv)
    add(PassageIndex(store), text, namespace=namespace)
    return kv.key


@pytest.mark.parametrize("kind", ["folder", "objects"])
def test_merge_index_merges_files_and_drops_deleted_passages(kind: str, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path) if kind == "folder" else objects_in_memory()
    keys = [stored(store, text) for text in TEXTS[:4]]
    stored(store, TEXTS[0], "tenant")
    store.delete(keys[0])
    running = PassageIndex(store, refresh_s=0)
    assert found(running, *TEXTS) == TEXTS[:4]
    assert merge_index(store) == IndexReport(passages=4, dropped=1)
    assert len(store.sidecar.names(folder_of(""))) == 1
    for index in (running, PassageIndex(store)):
        assert found(index, *TEXTS) == TEXTS[1:4]
        assert found(index, *TEXTS, access=Access("tenant")) == TEXTS[:1]
    assert merge_index(store) == IndexReport(passages=4, dropped=0)
    for key in keys[1:]:
        store.delete(key)
    assert merge_index(store) == IndexReport(passages=1, dropped=3)
    assert found(running, *TEXTS) == []
    assert found(PassageIndex(store), *TEXTS) == []


def test_merge_index_adds_passages_that_are_stored(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    stored(store, TEXTS[0])
    shutil.rmtree(tmp_path / "sidecar")
    assert merge_index(store, {"": entries_of(TEXTS)}) == IndexReport(passages=1, dropped=7)
    assert found(PassageIndex(store), *TEXTS) == TEXTS[:1]


def test_merge_index_keeps_passages_if_the_store_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = DirectoryStore(tmp_path)
    stored(store, TEXTS[0])
    with monkeypatch.context() as failing:
        failing.setattr(DirectoryStore, "describe", Mock(side_effect=StoreError("unreachable")))
        assert merge_index(store) == IndexReport(passages=1, dropped=0)
    assert "because a read failed: unreachable" in caplog.text
    assert found(PassageIndex(store), *TEXTS) == TEXTS[:1]


def test_merge_index_keeps_passages_of_entries_without_a_handle(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    stored(store, TEXTS[0], is_known=False)
    add(PassageIndex(store), TEXTS[1])
    assert merge_index(store) == IndexReport(passages=2, dropped=0)
