"""A store in an object store: S3, Google Cloud Storage, Azure, and what speaks like them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any

from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.base import (
    EntryInfo,
    EntryPart,
    Found,
    StoredEntry,
    StoreStats,
    check_found_under,
    check_key_of,
    is_key,
)
from blockattn_rag.store.checks import check_finite, check_storable
from blockattn_rag.store.deadlines import check_seconds
from blockattn_rag.store.format import decode, encode
from blockattn_rag.store.header import FormatError, Header, header_end, read_header
from blockattn_rag.store.layout import ByteRange
from blockattn_rag.store.object_client import ObjectClient, connect
from blockattn_rag.store.urls import check_no_credentials

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore as Backend

_OBJECTS = "objects"
_SUFFIX = ".safetensors"
_NAME = re.compile(rf"{_OBJECTS}/([0-9a-f]{{2}})/([0-9a-f]{{64}}){re.escape(_SUFFIX)}")

# A header of most models is smaller; the length of a larger one stands in its first bytes.
_HEADER_BYTES = 16 << 10

_ENVIRONMENT = "the environment variables of the provider, such as AWS_ACCESS_KEY_ID"


class ObjectStore:
    """``KVStore`` in a bucket. Threads, processes and machines may read and write it at once.

    An entry is one object, ``objects/ab/<key>.safetensors`` under the address, as in a
    ``DirectoryStore``: a folder that was copied to a bucket as it stands is a store. An object is
    written whole or not at all, and replaced in one step. ``get`` reads it whole into memory of
    its own, in parts at once, all of one version, and checks it there.

    Object stores do not record when an object was read, so the time of use of an entry is the time
    at which it was written, and ``touch`` makes no entry younger.

    Credentials come from the environment (``AWS_ACCESS_KEY_ID`` and its kin, or the machine's
    role), never from the address. ``AWS_ENDPOINT_URL`` names another server than Amazon's.

    Args:
        url: ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``.
        deadline_s: seconds that a read may take, retries included; ``get_many`` is one read. A
            write may take as long for each of its requests.
        retries: how often a request that failed is made again, at most.
        parallel: reads at once, at most.
        backend: an obstore store that is open at this address, with options of your own.

    Raises:
        ImportError: obstore is not installed.
        ValueError: ``url`` cannot be used, or holds credentials.
    """

    def __init__(
        self,
        url: str,
        *,
        deadline_s: float = 30.0,
        retries: int = 3,
        parallel: int = 16,
        backend: Backend | None = None,
    ) -> None:
        check_no_credentials(url, _ENVIRONMENT)
        check_seconds("deadline_s", deadline_s)
        self.url = url.rstrip("/")
        self._reopen = partial(
            ObjectStore, self.url, deadline_s=deadline_s, retries=retries, parallel=parallel
        )
        self._own_backend = backend is None
        opened = backend if backend is not None else connect(self.url, deadline_s, retries)
        self._client = ObjectClient(self.url, opened, deadline_s, parallel)

    def __repr__(self) -> str:
        return f"ObjectStore({self.url!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        if not self._own_backend:
            raise TypeError(
                f"{self!r} was made of an open backend, which may hold credentials, and cannot be "
                "pickled; open it by its address alone"
            )
        return self._reopen, ()

    def get(self, key: str) -> BlockKV | None:
        """The entry, or None if there is none.

        Raises:
            CorruptEntryError: the object is damaged, truncated, or of another format version.
            FingerprintMismatchError: the object holds the entry of another text or model.
            StoreError: it cannot be read, or not before the deadline.
        """
        (found,) = self.get_many([key])
        if isinstance(found, StoreError):
            raise found
        return found

    peek = get

    def get_many(self, keys: Sequence[str]) -> list[Found]:
        """As ``get`` for each key, all at once, with one deadline."""
        contents = self._client.read_many([entry_path(key) for key in keys])
        return [self._entry(*each) for each in zip(keys, contents, strict=True)]

    def read_ranges(
        self,
        keys: Sequence[str],
        wanted: Callable[[Header], Sequence[ByteRange]],
        head_bytes: int,
    ) -> list[EntryPart | StoreError | None]:
        """As ``RangeStore.read_ranges``, with one deadline."""
        chosen: dict[str, tuple[Header, Sequence[ByteRange]]] = {}

        def choose(key: str, first: memoryview, size: int) -> Sequence[ByteRange]:
            header = self._header(key, first, size)
            chosen[key] = header, wanted(header)
            return chosen[key][1]

        wishes = [(entry_path(key), partial(choose, key)) for key in keys]
        found = self._client.read_ranges(wishes, head_bytes)
        return [
            EntryPart(*chosen[key], data, self._client.place(entry_path(key)))
            if isinstance(data, Tensor)
            else data
            for key, data in zip(keys, found, strict=True)
        ]

    def touch(self, key: str) -> bool:
        """True if there is an entry that looks sound. It is *not* marked as used: see the class.

        The header is checked, and that the object has the size that the header says.

        Raises:
            StoreError: the server does not say.
        """
        try:
            return self.describe(key) is not None
        except (CorruptEntryError, FingerprintMismatchError):
            return False

    def put(self, key: str, kv: BlockKV) -> None:
        """As ``KVStore.put``; raises StoreError as well if the block holds NaN or infinity."""
        check_key_of(key, kv)
        check_storable(kv)
        path = entry_path(key)
        check_finite(kv, self._client.place(path))
        self._client.write(path, b"".join(encode(kv)))

    def __contains__(self, key: object) -> bool:
        """Whether there is an object of that name. Its content is checked by ``get``."""
        return is_key(key) and self._client.head(entry_path(key)) is not None

    def delete(self, key: str) -> bool:
        return self._client.delete(entry_path(key))

    def discard(self, key: str, used_ns: int) -> bool:
        """Delete an entry unless it was replaced since ``used_ns``; True if deleted.

        Times are compared by the second, which is what all object stores tell alike. An entry that
        is replaced between the look and the deletion is lost, and costs one computation.
        """
        head = self._client.head(entry_path(key))
        if head is None or _written_ns(head) // 10**9 != used_ns // 10**9:
            return False
        return self.delete(key)

    def keys(self) -> Iterator[str]:
        """Keys as they are listed, page by page."""
        return (entry.key for entry in self.entries())

    def entries(self) -> Iterator[StoredEntry]:
        """Entries as they are listed, page by page. ``used_ns``: when the object was written."""
        for found in self._client.list(_OBJECTS):
            name = _NAME.fullmatch(found["path"])
            if name is not None and name[2].startswith(name[1]):
                yield StoredEntry(name[2], found["size"], _written_ns(found))

    def stats(self) -> StoreStats:
        """Lists all objects: one request for 1000 of them."""
        entries = total_bytes = 0
        for entry in self.entries():
            entries += 1
            total_bytes += entry.nbytes
        return StoreStats(entries, total_bytes)

    def describe(self, key: str) -> EntryInfo | None:
        """What the entry's header says, without reading its tensors; None if there is no entry.

        Raises:
            StoreError: as ``get``.
        """
        path = entry_path(key)
        try:
            found = self._client.read_start(path, _HEADER_BYTES)
            if found is not None and len(found[0]) < (end := header_end(found[0])):
                found = self._client.read_start(path, end)
            if found is None:
                return None
            start, meta = found
            header = read_header(BytesIO(start), meta["size"])
        except FormatError as error:
            raise self._damaged(path, error) from error
        check_found_under(key, header, self._client.place(path))
        return EntryInfo.of(header, meta["size"], _written_ns(meta))

    def _header(self, key: str, first: memoryview, size: int) -> Header:
        """The header in an object's first bytes."""
        path = entry_path(key)
        try:
            end = header_end(first)
            if len(first) < end <= size:
                raise FingerprintMismatchError(
                    f"{self._client.place(path)} has a header of {end} bytes, expected at most "
                    f"{len(first)}: it is of another model, or another format"
                )
            header = read_header(BytesIO(first), size)
        except FormatError as error:
            raise self._damaged(path, error) from error
        check_found_under(key, header, self._client.place(path))
        return header

    def _entry(self, key: str, content: Tensor | StoreError | None) -> Found:
        if not isinstance(content, Tensor):
            return content
        try:
            kv = decode(content)
            check_found_under(key, kv, self._client.place(entry_path(key)))
        except FormatError as error:
            return self._damaged(entry_path(key), error)
        except FingerprintMismatchError as error:
            return error
        return kv

    def _damaged(self, path: str, error: FormatError) -> CorruptEntryError:
        return CorruptEntryError(
            f"{self._client.place(path)} is damaged: {error}; delete it, or put the block anew"
        )


def entry_path(key: str) -> str:
    """Where the entry of this key is, or would be, under the store's address."""
    if not is_key(key):
        raise ValueError(f"a store key is 64 hex digits (kv.store_key), found {key!r}")
    return f"{_OBJECTS}/{key[:2]}/{key}{_SUFFIX}"


def _written_ns(meta: ObjectMeta) -> int:
    """When an object was written, nanoseconds since 1970."""
    return int(meta["last_modified"].timestamp() * 1e9)
