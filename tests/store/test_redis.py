"""RedisStore: expiry, limits and server errors."""

from __future__ import annotations

import logging
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.store import RedisStore
from tests.store.kvs import make_kv, same
from tests.store.servers import HAS_REDIS, free_port, redis_server

pytest.importorskip("redis")
KV = make_kv(tokens=20)
KEY = KV.key


@pytest.fixture
def client(redis_url: str) -> Any:
    from redis import Redis

    with Redis.from_url(redis_url) as client:
        yield client


def test_prefixes_separate_stores(redis: RedisStore, redis_url: str) -> None:
    redis.put(KEY, KV)
    other = RedisStore(redis_url, prefix="other[*]:")
    assert other.get(KEY) is None
    other.put(KEY, KV)
    assert list(other.keys()) == list(redis.keys()) == [KEY]
    assert other.delete(KEY)
    assert KEY in redis


def test_unused_entry_expires(redis_url: str, client: Any) -> None:
    store = RedisStore(redis_url, prefix="ttl:", ttl_s=100.0)
    name = f"ttl:{KEY}"
    store.put(KEY, KV)
    assert 90_000 < client.pttl(name) <= 100_000
    for use in (store.get, store.touch):
        client.pexpire(name, 5000)
        assert use(KEY)
        assert client.pttl(name) > 90_000
    short = RedisStore(redis_url, prefix="ttl:", ttl_s=0.1)
    short.put(KEY, KV)
    time.sleep(0.3)
    assert short.get(KEY) is None
    assert not short.touch(KEY)


def test_ttl_none_leaves_eviction_to_the_server(redis_url: str, client: Any) -> None:
    store = RedisStore(redis_url, prefix="for ever:", ttl_s=None)
    store.put(KEY, KV)
    assert store.touch(KEY)
    assert store.get(KEY) is not None
    assert client.ttl(f"for ever:{KEY}") == -1


def test_large_entry_is_refused_once(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    store = RedisStore(redis_url, prefix="small:", max_entry_bytes=10_000)
    store.put(KEY, KV)
    large = make_kv(tokens=400)
    assert large.key == KEY
    with caplog.at_level(logging.WARNING):
        store.put(KEY, large)
        store.put(KEY, large)
    assert store.get(KEY) is None  # the old entry is deleted too
    assert store.stats().refused == 2
    assert len(caplog.records) == 1
    assert "raise max_entry_bytes" in caplog.text


def test_value_of_wrong_type_is_damaged(redis_url: str, client: Any) -> None:
    store, other = RedisStore(redis_url, prefix="mixed:"), make_kv("other")
    store.put(other.key, other)
    client.lpush(f"mixed:{KEY}", b"no text")
    damaged, sound = store.get_many([KEY, other.key])
    assert isinstance(damaged, CorruptEntryError)
    assert "WRONGTYPE" in str(damaged)
    assert not isinstance(sound, StoreError)


def test_refused_read_is_not_damage(redis: RedisStore, client: Any) -> None:
    client.acl_setuser("reader", enabled=True, nopass=True, keys=["none"], categories=["+@all"])
    redis._server.connection_pool.connection_kwargs["username"] = "reader"
    redis._server.connection_pool.connection_kwargs["password"] = "any"
    (refused,) = redis.get_many([KEY])
    assert type(refused) is StoreError
    assert "permission" in str(refused).lower()


def test_unreachable_server_fails_at_once() -> None:
    store = RedisStore(f"redis://127.0.0.1:{free_port()}/0", deadline_s=5)
    started = time.monotonic()
    with pytest.raises(StoreError, match="Cannot read entries in redis:"):
        store.get(KEY)
    with pytest.raises(StoreError, match="Cannot write an entry in redis:"):
        store.put(KEY, KV)
    assert all(isinstance(one, StoreError) for one in store.get_many([KEY, KEY]))
    with pytest.raises(StoreError, match="Cannot list"):
        list(store.keys())
    with pytest.raises(StoreError, match="Cannot look up an entry"):
        _ = KEY in store
    assert time.monotonic() - started < 4


def test_hanging_server_fails_at_the_deadline() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", deadline_s=0.3)
        started = time.monotonic()
        with pytest.raises(StoreError, match="Cannot read entries in"):
            store.get(KEY)
        assert time.monotonic() - started < 2


@pytest.mark.skipif(not HAS_REDIS, reason="needs the command redis-server")
def test_password_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with redis_server(tmp_path, "--requirepass", "s3cr3t-visible") as url:
        monkeypatch.setenv("REDIS_PASSWORD", "wrong-s3cr3t-visible")
        store = RedisStore(url)
        with pytest.raises(StoreError) as told:
            store.get(KEY)
        monkeypatch.setenv("REDIS_PASSWORD", "s3cr3t-visible")
        store = RedisStore(url)
        store.put(KEY, KV)
        found = pickle.loads(pickle.dumps(store)).get(KEY)
        assert same(found, KV)
    shown = [str(told.value), repr(store), pickle.dumps(store).decode(errors="replace")]
    assert not any("s3cr3t" in text for text in shown)


def test_invalid_limits_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 536870912, the limit of Redis"):
        RedisStore("redis://localhost", max_entry_bytes=1 << 30)
    with pytest.raises(ValueError, match="max_bytes must be positive"):
        RedisStore("redis://localhost", max_entry_bytes=0)
    with pytest.raises(ValueError, match="ttl_s must be a positive"):
        RedisStore("redis://localhost", ttl_s=0)
    with pytest.raises(ValueError, match="deadline_s must be a positive"):
        RedisStore("redis://localhost", deadline_s=0)
    with pytest.raises(ValueError, match="Cannot open a store at redis://localhost:port"):
        RedisStore("redis://localhost:port/0")
