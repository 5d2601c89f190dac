"""Fixtures: stores of every kind, on servers that are started once per test process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import pytest

from blockattn_rag.store import (
    DirectoryStore,
    KVStore,
    MaintainedStore,
    MemoryStore,
    ObjectStore,
    RedisStore,
    TieredStore,
)
from blockattn_rag.store.objects import entry_path
from tests.store.servers import BUCKET, HAS_MOTO, HAS_REDIS, S3_ENVIRONMENT, redis_server, s3_server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Address of an S3 server."""
    if not HAS_MOTO:
        pytest.skip("needs moto[server] and obstore from the extra `test`")
    with s3_server() as url:
        yield url


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Redis server."""
    if not HAS_REDIS:
        pytest.skip("needs the command redis-server and the package redis")
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Address of an empty store on the S3 server, which is configured in the environment."""
    for name, value in {**S3_ENVIRONMENT, "AWS_ENDPOINT_URL": s3_url}.items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/store-{next(_numbers)}"


@pytest.fixture
def redis(redis_url: str) -> RedisStore:
    """An empty store on the Redis server."""
    return RedisStore(redis_url, prefix=f"store-{next(_numbers)}:")


def objects_in_memory(backend: Any = None) -> ObjectStore:
    obstore = pytest.importorskip("obstore.store")
    return ObjectStore("memory://kv", backend=backend or obstore.MemoryStore(), deadline_s=30)


class Asked:
    """Backend that records the requested ranges."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.ranges: list[tuple[str, int, int]] = []

    def get(self, path: str, *, options: Any) -> Any:
        self.ranges.append((path, *options["range"]))
        return self.backend.get(path, options=options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def flip_bit(path: Path, byte: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


S = TypeVar("S", bound=KVStore, covariant=True)


@dataclass(frozen=True)
class Raw(Generic[S]):
    """An empty store, with access to the encoded bytes of its entries."""

    store: S
    read: Callable[[str], bytes]
    write: Callable[[str, bytes], object]

    def flip_last_bit(self, key: str) -> None:
        content = self.read(key)
        self.write(key, content[:-1] + bytes([content[-1] ^ 1]))


def raw_directory(path: Path) -> Raw[MaintainedStore]:
    store = DirectoryStore(path)

    def write(key: str, content: bytes) -> None:
        store.entry_path(key).parent.mkdir(parents=True, exist_ok=True)
        store.entry_path(key).write_bytes(content)

    return Raw(store, lambda key: store.entry_path(key).read_bytes(), write)


def raw_objects() -> Raw[MaintainedStore]:
    backend = pytest.importorskip("obstore.store").MemoryStore()
    return Raw(
        objects_in_memory(backend),
        lambda key: bytes(backend.get(entry_path(key)).bytes()),
        lambda key, content: backend.put(entry_path(key), content),
    )


def raw_redis(url: str) -> Raw[RedisStore]:
    client = pytest.importorskip("redis").Redis.from_url(url)
    prefix = f"store-{next(_numbers)}:"
    return Raw(
        RedisStore(url, prefix=prefix),
        lambda key: client.get(f"{prefix}{key}"),
        lambda key, content: client.set(f"{prefix}{key}", content),
    )


@pytest.fixture(params=["directory", "objects"])
def maintained(request: pytest.FixtureRequest, tmp_path: Path) -> Raw[MaintainedStore]:
    return raw_directory(tmp_path / "kv") if request.param == "directory" else raw_objects()


@pytest.fixture(params=["directory", "objects", "redis"])
def encoded(request: pytest.FixtureRequest, tmp_path: Path) -> Raw[KVStore]:
    kinds: dict[str, Callable[[], Raw[KVStore]]] = {
        "directory": lambda: raw_directory(tmp_path / "kv"),
        "objects": raw_objects,
        "redis": lambda: raw_redis(request.getfixturevalue("redis_url")),
    }
    return kinds[request.param]()


@pytest.fixture(
    params=["memory", "memory on the host", "directory", "objects", "s3", "redis", "tiers"]
)
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> KVStore:
    """An empty store, of each kind in turn."""
    return opened(request, tmp_path)


def opened(request: pytest.FixtureRequest, path: Path) -> KVStore:
    """Open an empty store of the kind ``request.param``."""
    kinds: dict[str, Callable[[], KVStore]] = {
        "memory": lambda: MemoryStore(1 << 30),
        "memory on the host": lambda: MemoryStore(1 << 30, on_host=True),
        "directory": lambda: DirectoryStore(path / "kv"),
        "objects": objects_in_memory,
        "s3": lambda: ObjectStore(request.getfixturevalue("s3")),
        "redis": lambda: request.getfixturevalue("redis"),
        "tiers": lambda: TieredStore(MemoryStore(1 << 30), path / "near", objects_in_memory()),
    }
    return kinds[request.param]()
