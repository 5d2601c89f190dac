"""ObjectStore on an S3 server and in obstore's memory."""

from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import StoreError
from blockattn_rag.store import DirectoryStore, ObjectStore
from blockattn_rag.store.objects import entry_path
from tests.store.kvs import make_kv, same

obstore = pytest.importorskip("obstore.store")

KV = make_kv(tokens=40)
KEY = KV.key


@pytest.fixture
def backend() -> Any:
    return obstore.MemoryStore()


@pytest.fixture
def store(backend: Any) -> ObjectStore:
    return ObjectStore("memory://kv", backend=backend, deadline_s=5)


class Slow:
    """Backend that blocks until ``go`` is set, and counts waiting requests."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.go = threading.Event()
        self.most = self.waiting = self.asked = 0
        self._lock = threading.Lock()

    def get(self, path: str, **options: Any) -> Any:
        with self._lock:
            self.waiting += 1
            self.asked += 1
            self.most = max(self.most, self.waiting)
        self.go.wait(10)
        with self._lock:
            self.waiting -= 1
        return self.backend.get(path, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def test_object_store_reads_and_writes_the_layout_of_a_folder(tmp_path: Path) -> None:
    on_disk = DirectoryStore(tmp_path / "kv")
    on_disk.put(KEY, KV)
    objects = ObjectStore("file:///kv", backend=obstore.LocalStore(tmp_path / "kv"))
    assert same(objects.get(KEY), KV)
    other = make_kv("other")
    objects.put(other.key, other)
    assert sorted(on_disk.keys()) == sorted(objects.keys()) == sorted([KEY, other.key])
    assert same(DirectoryStore(tmp_path / "kv").get(other.key), other)


def test_other_objects_are_not_listed(store: ObjectStore, backend: Any) -> None:
    store.put(KEY, KV)
    for path in (f"objects/00/{KEY}.safetensors", f"objects/{KEY}.safetensors", "objects/x", "y"):
        backend.put(path, b"?")
    assert list(store.keys()) == [KEY]


@pytest.mark.parametrize("part_bytes", [100, 1000, 1 << 20])
def test_entry_is_read_in_parts(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    store.put(KEY, KV)
    monkeypatch.setattr("blockattn_rag.store.object_client._PART_BYTES", part_bytes)
    assert same(store.get(KEY), KV)


# Maintenance


def test_long_headers_are_read_twice(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, KV)
    expected = store.describe(KEY)
    monkeypatch.setattr("blockattn_rag.store.objects._HEADER_BYTES", 20)
    found = store.describe(KEY)
    assert found is not None
    assert expected is not None
    assert (found.header, found.nbytes) == (expected.header, expected.nbytes)


# Deadlines and concurrency


def test_hanging_server_fails_at_the_deadline(backend: Any) -> None:
    ObjectStore("memory://kv", backend=backend).put(KEY, KV)
    slow = Slow(backend)
    store = ObjectStore("memory://kv", backend=slow, deadline_s=0.2, parallel=2)  # type: ignore[arg-type]
    started = time.monotonic()
    found = store.get_many([KEY] * 6)
    assert time.monotonic() - started < 2
    assert all(isinstance(one, StoreError) for one in found)
    assert "no response before the deadline" in str(found[0])
    assert slow.most == 2
    slow.go.set()
    assert store.get(KEY) is not None


def test_late_answers_start_no_further_reads(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockattn_rag.store.object_client._PART_BYTES", 1000)
    ObjectStore("memory://kv", backend=backend).put(KEY, KV)
    parts = -(-backend.head(entry_path(KEY))["size"] // 1000)
    slow = Slow(backend)
    store = ObjectStore("memory://kv", backend=slow, deadline_s=1, parallel=1)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match="no response before the deadline"):
        store.get(KEY)
    slow.go.set()
    store._client.deadline_s = 60
    assert store.get(KEY) is not None
    assert parts > 3
    assert slow.asked == 1 + parts


# Credentials and addresses


def test_credentials_are_never_shown(monkeypatch: pytest.MonkeyPatch, s3: str) -> None:
    secrets = {"AWS_ACCESS_KEY_ID": "AKIAVISIBLE", "AWS_SECRET_ACCESS_KEY": "s3cr3t-visible"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no server listens here
    store = ObjectStore(s3, deadline_s=1, retries=0)
    with pytest.raises(StoreError, match=f"Cannot read {s3}/objects/") as told:
        store.get(KEY)
    shown = [repr(store), str(store), repr(vars(store)), str(told.value), repr(told.value)]
    shown.append(pickle.dumps(store).decode(errors="replace"))
    for value in secrets.values():
        assert not any(value in text for text in shown)
    assert told.value.__cause__ is None


def test_pickles_without_backend(s3: str, store: ObjectStore) -> None:
    opened = ObjectStore(s3)
    opened.put(KEY, KV)
    again = pickle.loads(pickle.dumps(opened))
    assert repr(again) == f"ObjectStore({s3!r})"
    assert same(again.get(KEY), KV)
    with pytest.raises(TypeError, match="open the store with only an address"):
        pickle.dumps(store)


def test_missing_bucket_raises(s3: str) -> None:
    store = ObjectStore("s3://no-such-bucket/kv", deadline_s=5, retries=0)
    with pytest.raises(StoreError, match="Cannot write s3://no-such-bucket/kv/objects"):
        store.put(KEY, KV)
    with pytest.raises(StoreError, match="NoSuchBucket"):
        list(store.keys())
