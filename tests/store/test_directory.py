"""DirectoryStore: entries on disk, damage and file system errors."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, StoreStats, open_store
from blockattn_rag.store import files as read_files
from tests.holding import LONGEST_S
from tests.store.kvs import make_kv, same


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "kv")


def stored(store: DirectoryStore, kv: BlockKV | None = None) -> tuple[str, Path]:
    """Put a block. Returns its key and its file."""
    kv = kv or make_kv()
    store.put(kv.key, kv)
    return kv.key, store.entry_path(kv.key)


def files(store: DirectoryStore) -> list[str]:
    return sorted(str(p.relative_to(store.path)) for p in store.path.rglob("*") if p.is_file())


# Stored entries


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_truncated_file_does_not_affect_read_blocks(store: DirectoryStore) -> None:
    key, path = stored(store, make_kv(layers=8, heads=3, tokens=64, head_dim=32))
    held = store.get(key)
    assert str(path) not in Path("/proc/self/maps").read_text()
    os.truncate(path, 0)
    assert same(held, make_kv(layers=8, heads=3, tokens=64, head_dim=32))


def test_reads_are_concurrent(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [stored(store, make_kv(f"passage {n}"))[0] for n in range(3)]
    all_read = threading.Barrier(3)
    read_ranges = read_files.read_ranges

    def meet(file: FileIO, ranges: Any) -> torch.Tensor:
        all_read.wait(LONGEST_S)  # continues when all three files have been read
        return read_ranges(file, ranges)

    monkeypatch.setattr(read_files, "read_ranges", meet)
    assert all(isinstance(entry, BlockKV) for entry in store.get_many(keys))


def test_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for spec in ("~/kv", Path("~/kv")):
        opened = open_store(spec)
        assert isinstance(opened, DirectoryStore)
        assert opened.path == tmp_path / "kv"


# Damage


def test_unreadable_entry_raises(store: DirectoryStore) -> None:
    key, path = stored(store)
    path.unlink()
    path.mkdir()
    for look in (store.get, store.describe):
        with pytest.raises(StoreError, match=f"Cannot read {path}"):
            look(key)
    with pytest.raises(StoreError, match=f"Cannot delete {path}"):
        store.delete(key)


@pytest.mark.parametrize("content", [b"", b"half an entry"])
def test_pipe_in_place_of_an_entry_is_damage(store: DirectoryStore, content: bytes) -> None:
    key, path = stored(store)
    path.unlink()
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR) if content else None  # a pipe with or without a writer
    try:
        if writer is not None:
            os.write(writer, content)
        for look in (store.get, store.describe):
            with pytest.raises(CorruptEntryError, match=f"{path} is damaged: expected a regular"):
                look(key)
        assert not store.touch(key)
        assert store.stats() == StoreStats(1, 0)
    finally:
        if writer is not None:
            os.close(writer)
    store.put(key, make_kv())
    assert same(store.get(key), make_kv())


def test_a_broken_link_in_place_of_an_entry_is_replaced(store: DirectoryStore) -> None:
    key, path = stored(store)
    path.unlink()
    path.symlink_to(path)
    for look in (store.get, store.describe):
        with pytest.raises(StoreError, match=f"Cannot read {path}: Too many levels"):
            look(key)
    assert key not in store
    assert not store.touch(key)
    assert store.stats() == StoreStats(1, 0)
    path.unlink()
    path.symlink_to(path.parent / "nothing")
    assert store.get(key) is None
    store.put(key, make_kv())
    assert same(store.get(key), make_kv())


def test_out_of_memory_is_no_damage(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    key, _ = stored(store)
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    monkeypatch.setattr(torch, "empty", Mock(side_effect=error))
    with pytest.raises(StoreError, match=r"Cannot read .*: not enough memory for \d+ ") as caught:
        store.get(key)
    assert not isinstance(caught.value, CorruptEntryError)


# The directory


def test_new_store_creates_its_directory(tmp_path: Path) -> None:
    DirectoryStore(tmp_path / "a" / "b")
    mark = json.loads((tmp_path / "a" / "b" / "format.json").read_text())
    assert mark == {"format": "blockattn_rag.kv", "version": 3}


def test_missing_store_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No store at"):
        DirectoryStore(tmp_path / "kv", create=False)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "objects/statue.txt"])
def test_directory_with_other_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    with pytest.raises(StoreError, match=rf"is not a store.*'{name}'.*empty or new directory"):
        DirectoryStore(tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def test_concurrent_creation_is_accepted(tmp_path: Path) -> None:
    (tmp_path / ".format.json.0123456789abcdef.tmp").touch()
    DirectoryStore(tmp_path)


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ('{"format": "blockattn_rag.kv", "version": 2}', "found .*2.*, expected .*3.*ingest into"),
        ('{"format": "blockattn_rag.kv", "version": 9}', "found .*9.*, expected .*3.*ingest into"),
        ('{"format": "blockattn_rag.kv", "version": [2]}', "found .*2.*, expected .*3"),
        ('{"format": "something else", "version": 3}', "found .*else.*, expected .*3"),
        ("[]", r"found \[\], expected"),
        ("{", "not readable JSON"),
        ("\xff", "not readable JSON"),
        ("[" * 100_000, "not readable JSON"),
        (None, r"format\.json is damaged"),
    ],
)
def test_another_store_version_is_refused(tmp_path: Path, mark: str | None, message: str) -> None:
    if mark is None:
        os.mkfifo(tmp_path / "format.json")
    else:
        (tmp_path / "format.json").write_bytes(mark.encode("latin-1"))
    with pytest.raises(StoreError, match=message):
        DirectoryStore(tmp_path)


def test_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").touch()
    with pytest.raises(StoreError, match="Cannot open a store at"):
        DirectoryStore(tmp_path / "kv")


@pytest.mark.parametrize("path", ["a\0b", "half a pair \ud83d"])
def test_invalid_path_is_refused(path: str) -> None:
    for open_it in (DirectoryStore, open_store):
        with pytest.raises(StoreError, match="Invalid folder name"):
            open_it(path)


def test_deleted_folder_is_recreated_by_put(store: DirectoryStore) -> None:
    key, _ = stored(store)
    shutil.rmtree(store.path)
    assert store.get(key) is None
    assert not store.touch(key)
    assert store.stats() == StoreStats(0, 0)
    assert list(store.leftovers()) == []
    stored(store)
    again = DirectoryStore(store.path, create=False)
    assert same(again.get(key), make_kv())


def test_deleted_mark_is_recreated(store: DirectoryStore) -> None:
    """The mark may be missing if entries were written while the folder was being deleted."""
    key, _ = stored(store)
    mark = store.path / "format.json"
    for mend in (lambda: stored(store), lambda: DirectoryStore(store.path)):
        mark.unlink()
        mend()
        assert same(DirectoryStore(store.path, create=False).get(key), make_kv())


def test_deleted_store_is_not_recreated_among_other_files(store: DirectoryStore) -> None:
    shutil.rmtree(store.path)
    store.path.mkdir()
    (store.path / "thesis.txt").touch()
    with pytest.raises(StoreError, match=r"is not a store.*'thesis\.txt'"):
        stored(store)
    assert os.listdir(store.path) == ["thesis.txt"]


def test_threads_recreate_a_deleted_store(store: DirectoryStore) -> None:
    kvs = [make_kv(f"passage {i}") for i in range(8)]
    for _ in range(10):
        shutil.rmtree(store.path)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda kv: store.put(kv.key, kv), kvs))
        assert DirectoryStore(store.path, create=False).stats().entries == 8


@pytest.mark.parametrize(
    "look",
    [DirectoryStore.stats, lambda store: list(store.keys()), lambda store: list(store.leftovers())],
)
def test_listing_and_writing_errors_name_the_folder(
    store: DirectoryStore, look: Callable[[DirectoryStore], object]
) -> None:
    (store.path / "objects").touch()
    with pytest.raises(StoreError, match=r"Cannot list .*objects: Not a directory"):
        look(store)
    with pytest.raises(StoreError, match=r"Cannot write .*objects"):
        stored(store)


def test_a_store_whose_folder_was_deleted_is_empty(store: DirectoryStore) -> None:
    keys = sorted(stored(store, make_kv(f"passage {i}"))[0] for i in range(5))
    listed = store.keys()
    first = next(listed)
    shutil.rmtree(store.path / "objects")
    assert [first, *listed] == keys[: 1 + sum(key[:2] == first[:2] for key in keys[1:])]


# Write errors


def test_interrupted_write_leaves_nothing(store: DirectoryStore) -> None:
    kv = make_kv(tokens=4000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (kv.nbytes // 2, limits[1]))
    try:
        with pytest.raises(StoreError, match=f"Cannot write {store.entry_path(kv.key)}"):
            store.put(kv.key, kv)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert files(store) == ["format.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failed_write_keeps_the_old_entry(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    key, _ = stored(store)
    before = files(store)
    monkeypatch.setattr(os, call, Mock(side_effect=full))
    with pytest.raises(StoreError, match="No space left"):
        store.put(key, make_kv(tokens=5))
    monkeypatch.undo()
    assert files(store) == before
    assert same(store.get(key), make_kv())


def test_writes_are_synced_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []

    def record(descriptor: int) -> None:
        synced.append("folder" if os.path.isdir(f"/dev/fd/{descriptor}") else "file")

    store, lazy = DirectoryStore(tmp_path / "a"), DirectoryStore(tmp_path / "b", fsync=False)
    stored(store)
    monkeypatch.setattr(os, "fsync", record)
    stored(store)
    assert synced == ["file", "folder"]
    stored(lazy)
    assert len(synced) == 2
