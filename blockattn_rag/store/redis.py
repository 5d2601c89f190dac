"""Block cache in a shared Redis or Valkey server."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import torch

from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.lazy import missing_extra
from blockattn_rag.store.base import KVStore, ReadResult, StoreStats
from blockattn_rag.store.checks import check_key, is_key
from blockattn_rag.store.concurrency import Readers, check_seconds, deadline, outcome
from blockattn_rag.store.eviction import Refusals, check_max_bytes
from blockattn_rag.store.format import decoded, encoded
from blockattn_rag.store.urls import check_no_credentials, reason

if TYPE_CHECKING:
    from redis import Redis
    from redis.exceptions import ResponseError

T = TypeVar("T")

_TTL_S = 7 * 86400
_MOST_ENTRY_BYTES = 512 << 20  # Maximum size of a Redis value.
_PAGE = 1000
_MOST_RETRIES = 1


class RedisStore(KVStore):
    """Cache in a Redis or Valkey server, for use in front of a permanent store (``TieredStore``).

    Evicted entries are read from the next tier; without one, they are encoded again. Set
    ``maxmemory`` and ``maxmemory-policy allkeys-lfu`` on the server.

    Args:
        url: ``redis://host:port/database``, or ``rediss://`` for TLS. User and password come from
            the environment: ``REDIS_USERNAME`` and ``REDIS_PASSWORD``.
        prefix: Prefix of the Redis keys.
        ttl_s: Seconds until an unused entry expires. None: entries do not expire. Default: 7 days.
        max_entry_bytes: Size limit of an entry, at most 512 MiB. Larger entries are not stored,
            because large values block the server for other clients. Default: 64 MiB.
        deadline_s: Timeout of a call in seconds; ``get_many`` is one call. A write that times out
            is retried once, so it may take twice as long.
        parallel: Maximum number of concurrent calls, not counting writes.

    Raises:
        ImportError: redis is not installed.
        ValueError: ``url`` is invalid or contains credentials, or a number is out of range.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "blockattn-rag:",
        ttl_s: float | None = _TTL_S,
        max_entry_bytes: int = 64 << 20,
        deadline_s: float = 5.0,
        parallel: int = 8,
    ) -> None:
        check_no_credentials(url)
        check_max_bytes(max_entry_bytes)
        if max_entry_bytes > _MOST_ENTRY_BYTES:
            raise ValueError(
                f"max_entry_bytes must be at most {_MOST_ENTRY_BYTES}, the limit of Redis; found "
                f"{max_entry_bytes}"
            )
        self.url = url.rstrip("/")
        self._reopen = partial(
            RedisStore, self.url, prefix=prefix, ttl_s=ttl_s, max_entry_bytes=max_entry_bytes,
            deadline_s=deadline_s, parallel=parallel,
        )  # fmt: skip
        self._prefix = prefix
        self._ttl_ms = None if ttl_s is None else int(1000 * check_seconds("ttl_s", ttl_s)) or 1
        self._max_entry_bytes = max_entry_bytes
        self._deadline_s = check_seconds("deadline_s", deadline_s)
        self._server = _connect(self.url, deadline_s)
        self._readers = Readers(parallel, "blockattn-rag-redis")
        self._refusals = Refusals("max_entry_bytes")

    def __repr__(self) -> str:
        return f"RedisStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        names = [self._name(key) for key in keys]
        if not names:
            return []
        try:
            values = self._asked("read entries", lambda: self._values(names))
        except StoreError as error:
            return [error] * len(names)
        return [self._entry(*each) for each in zip(keys, values, strict=True)]

    def touch(self, key: str) -> bool:
        name, ttl_ms = self._name(key), self._ttl_ms
        if ttl_ms is None:
            return key in self
        return bool(self._asked("update an entry", lambda: self._server.pexpire(name, ttl_ms)))

    def put(self, key: str, kv: BlockKV) -> None:
        name = self._name(kv.key)
        content = encoded(key, kv, f"{self.url} {name}")
        with self._explained("write an entry"):
            if len(content) <= self._max_entry_bytes:
                self._server.set(name, content, px=self._ttl_ms)
                return
            self._server.delete(name)
        self._refusals.add(self, len(content))

    def __contains__(self, key: object) -> bool:
        return is_key(key) and bool(
            self._asked("look up an entry", partial(self._server.exists, self._name(key)))
        )

    def delete(self, key: str) -> bool:
        return bool(self._asked("delete an entry", partial(self._server.delete, self._name(key))))

    def keys(self) -> Iterator[str]:
        """Iterate over all keys. A key may appear twice if entries are written concurrently."""
        pattern = re.sub(r"([\\*?\[\]^-])", r"\\\1", self._prefix) + "*"
        with self._explained("list entries"):
            for name in self._server.scan_iter(match=pattern, count=_PAGE):
                key = bytes(name).decode(errors="replace").removeprefix(self._prefix)
                if is_key(key):
                    yield key

    def stats(self) -> StoreStats:
        """Return size and counters. Requests each entry's size, which is slow for a large cache."""
        keys = set(self.keys())
        lengths = [partial(self._server.strlen, self._name(key)) for key in keys]
        total_bytes = sum(int(self._asked("look up an entry", length)) for length in lengths)
        return StoreStats(len(keys), total_bytes, refused=self._refusals.count)

    def _name(self, key: str) -> str:
        return f"{self._prefix}{check_key(key)}"

    def _values(self, names: Sequence[str]) -> list[bytes | ResponseError | None]:
        """Read values in one round trip, and restart their times to live."""
        with self._server.pipeline(transaction=False) as calls:
            for name in names:
                if self._ttl_ms is None:
                    calls.get(name)
                else:
                    calls.getex(name, px=self._ttl_ms)
            return list(calls.execute(raise_on_error=False))

    def _entry(self, key: str, value: bytes | ResponseError | None) -> ReadResult:
        if value is None:
            return None
        place = f"{self.url} {self._name(key)}"
        if not isinstance(value, bytes):
            if not str(value).startswith("WRONGTYPE"):
                return StoreError(f"Cannot read {place}: {reason(value)}")
            return CorruptEntryError(
                f"{place} is damaged: {reason(value)}; delete it, or put the block again"
            )
        raw = torch.empty(len(value), dtype=torch.uint8)
        raw.numpy().data[:] = value
        try:
            return decoded(key, raw, place)
        except StoreError as error:
            return error

    def _asked(self, doing: str, call: Callable[[], T]) -> T:
        """Call the server, and wait for its response until the deadline."""
        asked = self._readers.start(call)
        with self._explained(doing):
            return outcome(asked, deadline(self._deadline_s), f"{doing} in {self.url}")

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as error:
            raise StoreError(f"Cannot {doing} in {self.url}: {reason(error)}") from None


def _connect(url: str, deadline_s: float) -> Redis:
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        raise ImportError(f"A store at {url} needs {missing_extra('redis', 'redis')}") from error
    if not re.fullmatch(r"/?\d*", path := urlsplit(url).path):
        raise ValueError(
            f"Invalid database {path[1:]!r} in {url}: expected a number, as in redis://host:6379/0"
        )
    try:
        client: Redis = Redis.from_url(
            url,
            username=os.environ.get("REDIS_USERNAME"),
            password=os.environ.get("REDIS_PASSWORD"),
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            # Reconnect if the server has closed the connection.
            retry=Retry(NoBackoff(), _MOST_RETRIES),
        )
    except ValueError as error:
        raise ValueError(f"Cannot open a store at {url}: {reason(error)}") from None
    return client
