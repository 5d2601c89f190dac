"""A cache of block KV in a Redis or Valkey server, which many machines share."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import torch

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.lazy import missing_extra
from blockattn_rag.store.base import (
    Found,
    StoreStats,
    check_key_of,
    check_max_bytes,
    is_key,
    warn_of_refused,
)
from blockattn_rag.store.checks import check_finite, check_storable
from blockattn_rag.store.deadlines import Readers, check_seconds, deadline, outcome
from blockattn_rag.store.format import decode, encode
from blockattn_rag.store.header import FormatError
from blockattn_rag.store.urls import check_no_credentials, reason

if TYPE_CHECKING:
    from redis import Redis
    from redis.exceptions import ResponseError

T = TypeVar("T")

DEFAULT_TTL_S = 7 * 86400
MOST_ENTRY_BYTES = 512 << 20
"""A server's own limit for one value."""

_PAGE = 1000
_MOST_RETRIES = 1
_ENVIRONMENT = "REDIS_USERNAME and REDIS_PASSWORD"


class RedisStore:
    """``KVStore`` in a Redis or Valkey server: a cache, never the only home of an entry.

    The server forgets an entry when it was not used for ``ttl_s``, and sooner if it needs the
    room: give it ``maxmemory`` and ``maxmemory-policy allkeys-lfu``. What it forgot is read from
    the next tier (``TieredStore``) or computed anew.

    Args:
        url: ``redis://host:port/database``, or ``rediss://`` with TLS. User and password come from
            the environment: ``REDIS_USERNAME`` and ``REDIS_PASSWORD``.
        prefix: of the names of entries in the server.
        ttl_s: seconds for which an entry is kept after its last use; None to leave it to the
            server.
        max_entry_bytes: a larger entry is not kept, at most 512 MiB. Large values keep a server
            from answering others.
        deadline_s: seconds that a call may take; ``get_many`` is one call. A write that the
            server did not answer is made once more, and may take as long again.
        parallel: calls at once, at most.

    Raises:
        ImportError: redis is not installed.
        ValueError: ``url`` cannot be used, or holds credentials.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "blockattn-rag:",
        ttl_s: float | None = DEFAULT_TTL_S,
        max_entry_bytes: int = 64 << 20,
        deadline_s: float = 5.0,
        parallel: int = 8,
    ) -> None:
        check_no_credentials(url, _ENVIRONMENT)
        check_max_bytes(max_entry_bytes)
        if max_entry_bytes > MOST_ENTRY_BYTES:
            raise ValueError(
                f"max_entry_bytes can be {MOST_ENTRY_BYTES} at most, the limit of a server; found "
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
        self._lock = threading.Lock()
        self._refused = 0

    def __repr__(self) -> str:
        return f"RedisStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen, ()

    def get(self, key: str) -> BlockKV | None:
        """The entry, or None if there is none. Counts as a use of it.

        Raises:
            CorruptEntryError: the value is damaged, or of another format version.
            FingerprintMismatchError: the value is the entry of another text or model.
            StoreError: the server does not give it, or not before the deadline.
        """
        (found,) = self.get_many([key])
        if isinstance(found, StoreError):
            raise found
        return found

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key, in one round trip, with one deadline."""
        names = [self._name(key) for key in keys]
        if not names:
            return []
        try:
            values = self._asked("read", lambda: self._values(names))
        except StoreError as error:
            return [error] * len(names)
        return [self._entry(*each) for each in zip(keys, values, strict=True)]

    def touch(self, key: str) -> bool:
        """Mark an entry as used now; True if there is one. Its content is not looked at."""
        name = self._name(key)
        if self._ttl_ms is None:
            return key in self
        ttl_ms = self._ttl_ms
        return bool(self._asked("touch", lambda: self._server.pexpire(name, ttl_ms)))

    def put(self, key: str, kv: BlockKV) -> None:
        """As ``KVStore.put``; raises StoreError as well if the block holds NaN or infinity.

        A larger entry than ``max_entry_bytes`` is not kept: it is counted in ``stats().refused``,
        and the first one is logged as a warning.
        """
        check_key_of(key, kv)
        check_storable(kv)
        name = self._name(key)
        check_finite(kv, f"{self.url} {name}")
        content = b"".join(encode(kv))
        if len(content) > self._max_entry_bytes:
            with self._explained("write"):
                self._server.delete(name)
            self._count_refused(len(content))
            return
        with self._explained("write"):
            self._server.set(name, content, px=self._ttl_ms)

    def __contains__(self, key: object) -> bool:
        if not is_key(key):
            return False
        name = self._name(key)
        return bool(self._asked("look", lambda: self._server.exists(name)))

    def delete(self, key: str) -> bool:
        name = self._name(key)
        return bool(self._asked("delete", lambda: self._server.delete(name)))

    def keys(self) -> Iterator[str]:
        """Keys as the server lists them; one may come twice while others are written."""
        pattern = re.sub(r"([\\*?\[\]^-])", r"\\\1", self._prefix) + "*"
        with self._explained("list"):
            for name in self._server.scan_iter(match=pattern, count=_PAGE):
                key = bytes(name).decode(errors="replace").removeprefix(self._prefix)
                if is_key(key):
                    yield key

    def stats(self) -> StoreStats:
        """Lists all entries and asks for the size of each: for a small cache."""
        keys = set(self.keys())
        sizes = [self._asked("look", partial(self._server.strlen, self._name(k))) for k in keys]
        return StoreStats(len(keys), sum(map(int, sizes)), refused=self._refused)

    def _name(self, key: str) -> str:
        if not is_key(key):
            raise ValueError(f"a store key is 64 hex digits (kv.store_key), found {key!r}")
        return f"{self._prefix}{key}"

    def _values(self, names: Sequence[str]) -> list[bytes | ResponseError | None]:
        """The values in one round trip; what is there lives for another ``ttl_s``."""
        with self._server.pipeline(transaction=False) as calls:
            for name in names:
                if self._ttl_ms is None:
                    calls.get(name)
                else:
                    calls.getex(name, px=self._ttl_ms)
            return list(calls.execute(raise_on_error=False))

    def _entry(self, key: str, value: bytes | ResponseError | None) -> Found:
        if value is None:
            return None
        place = f"{self.url} {self._name(key)}"
        if not isinstance(value, bytes):
            if not str(value).startswith("WRONGTYPE"):
                return StoreError(f"cannot read {place}: {reason(value)}")
            return CorruptEntryError(
                f"{place} is damaged: {reason(value)}; delete it, or put the block anew"
            )
        raw = torch.empty(len(value), dtype=torch.uint8)
        raw.numpy().data[:] = value
        try:
            kv = decode(raw)
        except FormatError as error:
            return CorruptEntryError(
                f"{place} is damaged: {error}; delete it, or put the block anew"
            )
        if kv.key != key:
            return FingerprintMismatchError(
                f"{place} holds the entry of another text or model, whose key is {kv.key}; delete "
                "it, or put the block anew"
            )
        return kv

    def _asked(self, doing: str, call: Callable[[], T]) -> T:
        """What the server answers, before the deadline."""
        asked = self._readers.start(call)
        with self._explained(doing):
            return outcome(asked, deadline(self._deadline_s), f"{doing} in {self.url}")

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        from redis.exceptions import RedisError

        try:
            yield
        except (RedisError, OSError) as error:
            raise StoreError(f"cannot {doing} in {self.url}: {reason(error)}") from None

    def _count_refused(self, nbytes: int) -> None:
        with self._lock:
            self._refused += 1
            is_first = self._refused == 1
        if is_first:
            warn_of_refused(self, nbytes, "max_entry_bytes")


def _connect(url: str, deadline_s: float) -> Redis:
    """A client of the server at an address; nothing is sent yet."""
    try:
        from redis import Redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ModuleNotFoundError as error:
        raise ImportError(f"a store at {url} needs {missing_extra('redis', 'redis')}") from error
    if not re.fullmatch(r"/?\d*", path := urlsplit(url).path):
        raise ValueError(
            f"found the database {path[1:]!r} in {url}, expected a number, as in redis://host:6379/0"
        )
    try:
        client: Redis = Redis.from_url(
            url,
            username=os.environ.get("REDIS_USERNAME"),
            password=os.environ.get("REDIS_PASSWORD"),
            socket_timeout=deadline_s,
            socket_connect_timeout=deadline_s,
            retry=Retry(NoBackoff(), _MOST_RETRIES),  # a connection that the server closed since
        )
    except ValueError as error:
        raise ValueError(f"cannot open a store at {url}: {reason(error)}") from None
    return client
