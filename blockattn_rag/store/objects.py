"""Store in a bucket on S3, Google Cloud Storage, Azure, or a compatible server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import (
    ChooseHeads,
    EntryInfo,
    MaintainedStore,
    ReadResult,
    StoredEntry,
    StoreStats,
)
from blockattn_rag.store.checks import check_key, is_key
from blockattn_rag.store.concurrency import check_seconds
from blockattn_rag.store.format import (
    check_entry_key,
    damage_reported,
    decode_part,
    decoded,
    encoded,
    ranges,
)
from blockattn_rag.store.header import Header, header_end, parse_header
from blockattn_rag.store.object_client import ObjectClient, ObjectSidecar, connect
from blockattn_rag.store.urls import check_no_credentials

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Backend

_OBJECTS = "objects"
_SUFFIX = ".safetensors"
_NAME = re.compile(rf"{_OBJECTS}/([0-9a-f]{{2}})/([0-9a-f]{{64}}){re.escape(_SUFFIX)}")

# Large enough for the entry headers of most models. A longer header requires a second read.
_HEADER_BYTES = 16 << 10


class ObjectStore(MaintainedStore):
    """Store in a bucket. Safe for concurrent use by threads, processes and machines.

    Uses the layout of a ``DirectoryStore``. Objects are written and replaced atomically. A read
    fetches parts of one object version concurrently, and verifies the complete entry. Object stores
    record only writes, so an entry's last use is its last write. Credentials come from the
    environment, never from the address (``docs/guides/stores.md``).

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        deadline_s: Timeout of a read in seconds, including retries; ``get_many`` is one read. For a
            write, it applies to each request.
        retries: Maximum number of retries of a failed request.
        parallel: Maximum number of concurrent reads.
        backend: obstore store to use instead of opening ``url``. ``retries`` is then ignored.

    Raises:
        ImportError: obstore is not installed.
        ValueError: ``url`` is invalid or contains credentials, or a number is out of range.
    """

    records_use = False

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 30.0,
        retries: int = 3,
        parallel: int = 16,
        backend: Backend | None = None,
    ) -> None:
        check_no_credentials(url)
        check_seconds("deadline_s", deadline_s)
        self.url = url.rstrip("/")
        self._reopen = backend is None and partial(
            ObjectStore, self.url, deadline_s=deadline_s, retries=retries, parallel=parallel
        )
        opened = backend if backend is not None else connect(self.url, deadline_s, retries)
        self._client = ObjectClient(self.url, opened, deadline_s, parallel)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._reopen:
            raise TypeError(
                f"{self!r} was opened with a backend object, which may contain credentials, so it "
                "cannot be pickled; open the store with only an address"
            )
        return self._reopen, ()

    @property
    def sidecar(self) -> ObjectSidecar:
        return ObjectSidecar(self._client)

    def get_many(self, keys: Sequence[str]) -> list[ReadResult]:
        def entry(key: str, content: Tensor) -> BlockKV:
            return decoded(key, content, self._client.place(entry_path(key)))

        contents = self._client.read_many([entry_path(key) for key in keys])
        return _results(keys, contents, entry)

    def read_parts(
        self, keys: Sequence[str], choose: ChooseHeads, head_bytes: int
    ) -> list[ReadResult]:
        chosen: dict[str, tuple[Header, Mapping[int, range]]] = {}

        def places(key: str, first: memoryview, size: int) -> Sequence[tuple[int, int]]:
            header = self._header(key, first, size)
            chosen[key] = header, choose(header)
            return ranges(*chosen[key])

        def part(key: str, content: Tensor) -> BlockKV:
            with damage_reported(self._client.place(entry_path(key))):
                return decode_part(*chosen[key], content)

        requests = [(entry_path(key), partial(places, key)) for key in keys]
        return _results(keys, self._client.read_ranges(requests, head_bytes), part)

    def touch(self, key: str) -> bool:
        """Whether an entry exists and has an intact header and size. Does not mark it as used."""
        try:
            return self.describe(key) is not None
        except (CorruptEntryError, FingerprintMismatchError):
            return False

    def put(self, key: str, kv: BlockKV) -> None:
        path = entry_path(kv.key)
        self._client.write(path, encoded(key, kv, self._client.place(path)))

    def __contains__(self, key: object) -> bool:
        return is_key(key) and self._client.head(entry_path(key)) is not None

    def delete(self, key: str) -> bool:
        return self._client.delete(entry_path(key))

    def discard(self, key: str, used_ns: int) -> bool | None:
        """Delete an entry unless it was replaced since ``used_ns``.

        Times are compared with a precision of one second, which all object stores support. An
        entry that is replaced between the comparison and the deletion is lost.
        """
        head = self._client.head(entry_path(key))
        if head is None:
            return None
        if _written_ns(head) // 10**9 != used_ns // 10**9:
            return False
        return self.delete(key)

    def keys(self) -> Iterator[str]:
        return (entry.key for entry in self.entries())

    def entries(self) -> Iterator[StoredEntry]:
        for meta in self._client.list(_OBJECTS):
            name = _NAME.fullmatch(meta["path"])
            if name is not None and name[2].startswith(name[1]):
                yield StoredEntry(name[2], meta["size"], _written_ns(meta))

    def stats(self) -> StoreStats:
        """Return size and counters. Lists all objects, with one request per 1000 objects."""
        sizes = [entry.nbytes for entry in self.entries()]
        return StoreStats(len(sizes), sum(sizes))

    def describe(self, key: str) -> EntryInfo | None:
        path = entry_path(key)
        with damage_reported(self._client.place(path)):
            start = self._client.read_start(path, _HEADER_BYTES)
            if start is not None and len(start[0]) < (end := header_end(start[0])):
                start = self._client.read_start(path, end)
            if start is None:
                return None
            content, meta = start
            header = self._header(key, content, meta["size"])
        return EntryInfo(header, meta["size"], _written_ns(meta))

    def _header(self, key: str, first: bytes | memoryview, size: int) -> Header:
        place = self._client.place(entry_path(key))
        with damage_reported(place):
            end = header_end(first)
            if len(first) < end <= size:
                raise FingerprintMismatchError(
                    f"{place} has a header of {end} bytes, but at most {len(first)} were expected: "
                    "it belongs to another model or format"
                )
            header = parse_header(first, size)
        check_entry_key(key, header, place)
        return header


def _results(
    keys: Sequence[str],
    contents: Sequence[Tensor | StoreError | None],
    decode: Callable[[str, Tensor], BlockKV],
) -> list[ReadResult]:
    results: list[ReadResult] = []
    for key, content in zip(keys, contents, strict=True):
        try:
            results.append(decode(key, content) if isinstance(content, Tensor) else content)
        except StoreError as error:
            results.append(error)
    return results


def entry_path(key: str) -> str:
    return f"{_OBJECTS}/{check_key(key)[:2]}/{key}{_SUFFIX}"


def _written_ns(meta: ObjectMeta) -> int:
    return int(meta["last_modified"].timestamp() * 1e9)
