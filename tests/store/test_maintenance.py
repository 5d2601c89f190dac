"""verify finds what is damaged; gc deletes what nothing refers to, and nothing that is young."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store import DirectoryStore, gc, verify
from tests.store.kvs import key_of, make_kv
from tests.store.test_format import fields_of, resealed

DAY_S = 86400.0
KV = [make_kv(f"passage {i}") for i in range(4)]
KEYS = [key_of(kv) for kv in KV]
HANDLES = [kv.handle for kv in KV]


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    """Four entries, written a day ago."""
    store = DirectoryStore(tmp_path)
    for key, kv in zip(KEYS, KV, strict=True):
        store.put(key, kv)
        make_old(store.entry_path(key))
    return store


def make_old(path: Path) -> None:
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - DAY_S))


def damage(store: DirectoryStore, key: str) -> None:
    path = store.entry_path(key)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


TENANTS = ["a", "a/private", "ab", "b"]


def leftover(folder: Path, name: str = "x") -> Path:
    """What a killed writer leaves, a day ago."""
    path = folder / f".{name}.0123456789abcdef.tmp"
    path.write_bytes(b"half")
    make_old(path)
    return path


def test_verify_finds_a_sound_store_sound(store: DirectoryStore) -> None:
    seen: list[int] = []
    report = verify(store, seen.append)
    assert (report.ok, report.deleted) == (4, 0)
    assert [t.count for t in (report.damaged, report.unread, report.leftovers)] == [0, 0, 0]
    assert report.total_bytes == store.stats().total_bytes
    assert seen == [1, 2, 3, 4]


def test_verify_names_damaged_and_foreign_entries_and_leftovers(store: DirectoryStore) -> None:
    damage(store, KEYS[0])
    os.replace(store.entry_path(KEYS[1]), store.entry_path(KEYS[2]))
    path = leftover(store.entry_path(KEYS[3]).parent)
    report = verify(store)
    assert report.ok == 1
    assert set(report.damaged.first) == {KEYS[0], KEYS[2]}
    assert "checksum" in report.damaged.first[KEYS[0]]
    assert "another text, model or tenant" in report.damaged.first[KEYS[2]]
    assert list(report.leftovers.first) == [str(path)]
    assert store.stats().entries == 3


def test_verify_deletes_what_is_damaged_if_asked(store: DirectoryStore) -> None:
    damage(store, KEYS[0])
    assert verify(store, delete_damaged=True).deleted == 1
    assert verify(store).ok == 3
    assert KEYS[0] not in store


def test_verify_deletes_nothing_for_want_of_memory_or_permission(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    peek = DirectoryStore.peek

    def refuse(self: DirectoryStore, key: str) -> BlockKV | None:
        if key == KEYS[0]:
            raise StoreError("cannot read it: Cannot allocate memory")
        return peek(self, key)

    monkeypatch.setattr(DirectoryStore, "peek", refuse)
    report = verify(store, delete_damaged=True)
    assert (report.ok, report.damaged.count, report.deleted) == (3, 0, 0)
    assert report.unread.first == {KEYS[0]: "cannot read it: Cannot allocate memory"}
    assert KEYS[0] in store


def test_verify_leaves_what_was_put_anew_since_it_was_read(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(store, KEYS[0])
    peek = DirectoryStore.peek

    def mend_then(self: DirectoryStore, key: str) -> BlockKV | None:
        try:
            return peek(self, key)
        finally:
            if key == KEYS[0]:
                store.put(key, KV[0])

    monkeypatch.setattr(DirectoryStore, "peek", mend_then)
    report = verify(store, delete_damaged=True)
    assert (list(report.damaged.first), report.deleted) == ([KEYS[0]], 0)
    monkeypatch.undo()
    assert verify(store).ok == 4


def test_verify_goes_on_when_it_cannot_delete(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in KEYS[:2]:
        damage(store, key)
    discard = DirectoryStore.discard

    def refuse(self: DirectoryStore, key: str, used_ns: int) -> bool:
        if key == min(KEYS[:2]):
            raise StoreError("cannot delete it")
        return discard(self, key, used_ns)

    monkeypatch.setattr(DirectoryStore, "discard", refuse)
    report = verify(store, delete_damaged=True)
    assert (report.ok, report.deleted) == (2, 1)
    assert report.errors.first == {min(KEYS[:2]): "cannot delete it"}


def test_verify_is_no_use_of_an_entry(store: DirectoryStore) -> None:
    before = list(store.entries())
    verify(store)
    assert list(store.entries()) == before


def test_what_is_no_file_stops_neither_verify_nor_gc(store: DirectoryStore) -> None:
    pipe, loop, folder, sound = (store.entry_path(key) for key in KEYS)
    for path in (pipe, loop, folder):
        path.unlink()
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    folder.mkdir()
    report = verify(store, delete_damaged=True)
    assert (report.ok, list(report.damaged.first), report.deleted) == (1, [KEYS[0]], 1)
    assert set(report.unread.first) == {KEYS[1], KEYS[2]}
    assert not pipe.exists()
    collected = gc(store, set())
    assert list(collected.deleted.first) == [sound.stem]
    assert collected.errors.count == 2


@pytest.mark.parametrize(
    "lie", [["a list"], {"a": "dictionary"}, "half a pair \ud83d", None, [[[[[]]]]]]
)
@pytest.mark.parametrize("name", ["handle", "fingerprint", "digest"])
def test_an_entry_that_lies_about_itself_stops_neither_verify_nor_gc(
    store: DirectoryStore, name: str, lie: object
) -> None:
    path = store.entry_path(KEYS[0])
    content = path.read_bytes()
    fields = fields_of(content)
    fields["__metadata__"][name] = lie
    path.write_bytes(resealed(fields, content))
    assert list(verify(store).damaged.first) == [KEYS[0]]
    report = gc(store, set())
    assert sorted(report.deleted.first) == sorted(KEYS[1:])
    assert report.errors.count == 1
    assert verify(store, delete_damaged=True).deleted == 1


def test_a_modification_time_in_the_future_keeps_neither_entry_nor_leftover(
    store: DirectoryStore,
) -> None:
    path = leftover(store.path)
    for odd in (path, store.entry_path(KEYS[0])):
        os.utime(odd, (4e9, 4e9))
    seconds_ahead = time.time() + 20  # as between two machines
    os.utime(store.entry_path(KEYS[1]), (seconds_ahead, seconds_ahead))
    report = gc(store, set(HANDLES[2:]))
    assert (list(report.deleted.first), report.kept_young) == ([KEYS[0]], 1)
    assert list(report.leftovers.first) == [str(path)]


def test_gc_keeps_what_is_referred_to_and_deletes_the_rest(store: DirectoryStore) -> None:
    sizes = [store.entry_path(key).stat().st_size for key in KEYS]
    report = gc(store, set(HANDLES[:3]))
    assert (report.kept, report.kept_young) == (3, 0)
    assert list(report.deleted.first) == [KEYS[3]]
    assert report.freed_bytes == sizes[3]
    assert not report.errors
    assert sorted(store.keys()) == sorted(KEYS[:3])


def test_gc_leaves_young_entries_alone(store: DirectoryStore) -> None:
    store.put(KEYS[3], KV[3])
    report = gc(store, set())
    assert (report.kept, report.kept_young, report.deleted.count) == (0, 1, 3)
    assert list(store.keys()) == [KEYS[3]]
    assert list(gc(store, set(), grace_s=0).deleted.first) == [KEYS[3]]


def test_a_dry_run_tells_the_same_and_deletes_nothing(store: DirectoryStore) -> None:
    path = leftover(store.path)
    told = gc(store, set(HANDLES[:1]), dry_run=True)
    assert len(list(store.keys())) == 4
    assert path.exists()
    assert told.dry_run
    done = gc(store, set(HANDLES[:1]))
    assert (done.deleted, done.freed_bytes) == (told.deleted, told.freed_bytes)
    assert list(done.leftovers.first) == list(told.leftovers.first) == [str(path)]
    assert not path.exists()


def test_entries_of_namespaces_that_are_not_judged_are_left_alone(store: DirectoryStore) -> None:
    others = [make_kv(f"passage {n}", namespace=name) for n, name in enumerate(TENANTS)]
    for one in others:
        store.put(key_of(one), one)
    report = gc(store, set(), grace_s=0, namespaces={"a"})
    assert set(report.deleted.first) == {key_of(others[0]), key_of(others[1])}
    assert (report.other, report.deleted.count) == (4 + 2, 2)
    assert gc(store, set(), grace_s=0, namespaces={""}).deleted.count == 4
    assert gc(store, set(), grace_s=0).deleted.count == 2


def test_entries_without_a_handle_go_by_their_age_alone(store: DirectoryStore) -> None:
    unnamed = replace(make_kv("of a server"), handle="")
    store.put(key_of(unnamed), unnamed)
    make_old(store.entry_path(key_of(unnamed)))
    assert (gc(store, set()).kept, list(store.keys())) == (1, [key_of(unnamed)])
    assert gc(store, set(), ttl_s=2 * DAY_S).kept == 1
    assert gc(store, set(), ttl_s=DAY_S / 2).deleted.count == 1


def test_gc_removes_old_leftovers_and_leaves_new_ones(store: DirectoryStore) -> None:
    shard = store.entry_path(KEYS[0]).parent
    old, new = leftover(shard, "old"), leftover(shard, "new")
    os.utime(new)
    report = gc(store, set(HANDLES))
    assert list(report.leftovers.first) == [str(old)]
    assert report.freed_bytes == len(b"half")
    assert list(store.leftovers()) == [new]


def test_gc_reports_what_it_cannot_read_and_goes_on(store: DirectoryStore) -> None:
    store.entry_path(KEYS[0]).write_bytes(b"")
    report = gc(store, set())
    assert report.errors.count == 1
    assert str(store.entry_path(KEYS[0])) in report.errors.first[KEYS[0]]
    assert report.deleted.count == 3


def test_gc_reports_what_it_cannot_delete_and_goes_on(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = leftover(store.path)
    rename, unlink = os.rename, Path.unlink

    def refuse_entry(source: Path, target: Path) -> None:
        if KEYS[0] in source.name:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    def refuse_leftover(path: Path, missing_ok: bool = False) -> None:
        if path == old:
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(os, "rename", refuse_entry)
    monkeypatch.setattr(Path, "unlink", refuse_leftover)
    report = gc(store, set())
    assert sorted(report.deleted.first) == sorted(KEYS[1:])
    assert not report.leftovers
    assert [error.split(":")[0] for error in report.errors.first.values()] == [
        f"cannot delete {store.entry_path(KEYS[0])}",
        f"cannot delete {old}",
    ]


def test_an_entry_that_vanishes_meanwhile_is_neither_deleted_nor_an_error(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    discard = DirectoryStore.discard

    def vanish(self: DirectoryStore, key: str, used_ns: int) -> bool:
        self.delete(key)
        return discard(self, key, used_ns)

    monkeypatch.setattr(DirectoryStore, "discard", vanish)
    report = gc(store, set())
    assert (report.deleted.count, report.errors.count) == (0, 0)


def test_a_store_that_cannot_be_listed_is_an_error(store: DirectoryStore) -> None:
    (store.path / "objects" / "00").touch()
    for look in (verify, lambda store: gc(store, set())):
        with pytest.raises(StoreError, match="cannot list"):
            look(store)
