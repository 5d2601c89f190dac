"""Object-store client with deadlines, and with error messages that contain no credentials."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
from torch import Tensor

from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.lazy import missing_extra
from blockattn_rag.store.base import SIDECAR, Sidecar
from blockattn_rag.store.concurrency import Readers, deadline, outcome, remaining
from blockattn_rag.store.urls import reason

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, ObjectMeta
    from obstore.store import ClientConfig, RetryConfig
    from obstore.store import ObjectStore as Backend

# One S3 connection transfers about 90 MB/s, so large objects are read over several connections.
_PART_BYTES = 8 << 20
_WRITTEN_PART_BYTES = 16 << 20
_PAGE = 1000

_BACKOFF_S = (0.1, 2.0)
_S3_SERVERS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT")

Choose = Callable[[memoryview, int], Sequence[tuple[int, int]]]
"""Function that selects byte ranges of an object to read, given its first bytes and its size."""

_Read = tuple[Tensor, list[Future[None]]]
"""Read in progress: the buffer, and the pending reads of the remaining parts."""


class ObjectClient:
    """Client that reads, writes and lists objects under an address."""

    def __init__(self, url: str, backend: Backend, deadline_s: float, parallel: int) -> None:
        self.url = url
        self.deadline_s = deadline_s
        self._backend = backend
        self._readers = Readers(parallel, "blockattn-rag-objects")

    def place(self, path: str) -> str:
        return f"{self.url}/{path}"

    def read_many(self, paths: Sequence[str]) -> list[Tensor | StoreError | None]:
        """Read complete objects concurrently, with one deadline for all. Returns a new uint8 tensor
        ``[size]`` for each object, None if it does not exist, or the error of a failed read."""
        return self.read_ranges(
            [(path, lambda _, size: [(0, size)]) for path in paths], _PART_BYTES
        )

    def read_ranges(
        self, requests: Sequence[tuple[str, Choose]], first_bytes: int
    ) -> list[Tensor | StoreError | None]:
        """Read byte ranges of objects, and concatenate the ranges of each object.

        The first read of an object has ``first_bytes`` bytes. Ranges within these bytes need no
        further read. Results are as in ``read_many``, including StoreErrors from ``Choose``.
        """
        until = deadline(self.deadline_s)
        start = self._readers.start
        reads = [start(self._begin, path, choose, first_bytes, until) for path, choose in requests]
        return [
            self._finish(path, read, until) for (path, _), read in zip(requests, reads, strict=True)
        ]

    def read_start(self, path: str, nbytes: int) -> tuple[bytes, ObjectMeta] | None:
        read = self._readers.start(self._range, path, 0, nbytes)
        start = outcome(read, deadline(self.deadline_s), f"read {self.place(path)}")
        return None if start is None else (bytes(start[0]), start[1])

    def head(self, path: str) -> ObjectMeta | None:
        read = self._readers.start(self._head, path)
        return outcome(read, deadline(self.deadline_s), f"look up {self.place(path)}")

    def write(self, path: str, content: bytes) -> None:
        with self._explained("write", path):
            self._backend.put(path, content, chunk_size=_WRITTEN_PART_BYTES)

    def delete(self, path: str) -> bool:
        if self.head(path) is None:  # Most servers do not report whether an object existed.
            return False
        with self._explained("delete", path):
            try:
                self._backend.delete(path)
            except FileNotFoundError:
                return False
        return True

    def list(self, folder: str) -> Iterator[ObjectMeta]:
        with self._explained("list", folder):
            for page in self._backend.list(folder, chunk_size=_PAGE):
                yield from page

    def _begin(self, path: str, choose: Choose, first_bytes: int, until: float) -> _Read | None:
        """Read an object's first part, and start reading the selected ranges. Raises StoreError
        after the deadline, because these reads would delay later requests."""
        head = self._range(path, 0, first_bytes)
        if head is None:
            return None
        if not remaining(until):
            raise StoreError(
                f"Cannot read {self.place(path)}: its first part arrived after the deadline"
            )
        first, meta = memoryview(head[0]), head[1]
        places = choose(first, meta["size"])
        size = sum(stop - start for start, stop in places)
        try:
            raw = torch.empty(size, dtype=torch.uint8)
        except RuntimeError:  # Raised by torch if the allocation fails.
            place = self.place(path)
            raise StoreError(f"Cannot read {place}: not enough memory for {size} bytes") from None
        view, at = raw.numpy().data, 0
        fill = partial(self._fill, path, e_tag=meta["e_tag"])
        parts = []
        for start, stop in places:
            known = first[start:stop]
            view[at : at + len(known)] = known
            for begin in range(start + len(known), stop, _PART_BYTES):
                end = min(begin + _PART_BYTES, stop)
                room = view[at + begin - start : at + end - start]
                parts.append(self._readers.start(fill, room, begin, end))
            at += stop - start
        return raw, parts

    def _fill(self, path: str, room: memoryview, start: int, stop: int, e_tag: str | None) -> None:
        part = self._range(path, start, stop, e_tag)
        if part is None:
            raise StoreError(f"Cannot read {self.place(path)}: it was deleted during the read")
        if len(part[0]) != stop - start:
            raise StoreError(
                f"Cannot read {self.place(path)}: received only {len(part[0])} bytes of the range "
                f"{start} to {stop}"
            )
        room[:] = memoryview(part[0])

    def _finish(
        self, path: str, read: Future[_Read | None], until: float
    ) -> Tensor | StoreError | None:
        doing = f"read {self.place(path)}"
        parts: list[Future[None]] = []
        try:
            begun = outcome(read, until, doing)
            if begun is None:
                return None
            raw, parts = begun
            for part in parts:
                outcome(part, until, doing)
        except StoreError as error:
            for part in parts:
                part.cancel()
            return error
        return raw

    def _range(
        self, path: str, start: int, stop: int, e_tag: str | None = None
    ) -> tuple[Bytes, ObjectMeta] | None:
        """Read a byte range of version ``e_tag`` of an object. Default: the latest version."""
        options: GetOptions = {"range": (start, stop)}
        if e_tag is not None:
            options["if_match"] = e_tag
        with self._explained("read", path):
            try:
                answer = self._backend.get(path, options=options)
                return answer.bytes(), answer.meta
            except FileNotFoundError:
                return None
            except Exception as error:
                if not start and "range" in str(error).lower():
                    head = self._head(path)
                    if head is not None and head["size"] == 0:
                        raise CorruptEntryError(
                            f"{self.place(path)} is damaged: it is empty; delete it"
                        ) from None
                raise

    def _head(self, path: str) -> ObjectMeta | None:
        with self._explained("look up", path):
            try:
                return self._backend.head(path)
            except FileNotFoundError:
                return None

    @contextmanager
    def _explained(self, doing: str, path: str) -> Iterator[None]:
        from obstore.exceptions import BaseError

        # In a fork, the client library's threads are not running, so calls would hang.
        if _first_user.setdefault("pid", os.getpid()) != os.getpid():
            raise StoreError(
                f"Cannot {doing} {self.place(path)}: this process was forked after its parent used "
                "an object store, and does not have the parent's threads; use the start method "
                "'spawn' or 'forkserver', or fork before using an object store"
            )
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            raise StoreError(f"Cannot {doing} {self.place(path)}: {reason(error)}") from None


class ObjectSidecar(Sidecar):
    """Sidecar files in a bucket, one object per file."""

    def __init__(self, client: ObjectClient) -> None:
        self._client = client

    def names(self, folder: str) -> list[str]:
        start = f"{SIDECAR}/{folder}"
        return [meta["path"].removeprefix(f"{start}/") for meta in self._client.list(start)]

    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        contents: list[bytes | None] = []
        for content in self._client.read_many([f"{SIDECAR}/{path}" for path in paths]):
            if isinstance(content, StoreError):
                raise content
            contents.append(None if content is None else content.numpy().tobytes())
        return contents

    def write(self, path: str, content: bytes) -> None:
        self._client.write(f"{SIDECAR}/{path}", content)

    def delete(self, path: str) -> None:
        self._client.delete(f"{SIDECAR}/{path}")


_first_user: dict[str, int] = {}  # PID of the first process to use the client library.


def connect(url: str, deadline_s: float, retries: int) -> Backend:
    """Open an obstore store with credentials from the environment. Sends no request."""
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ModuleNotFoundError as error:
        raise ImportError(f"A store at {url} needs {missing_extra('obstore', 's3')}") from error
    if not urlsplit(url).netloc:
        raise ValueError(f"No bucket in {url}, expected an address such as s3://bucket/kv")
    limit = timedelta(seconds=deadline_s)
    least, most = (timedelta(seconds=min(seconds, deadline_s)) for seconds in _BACKOFF_S)
    client: ClientConfig = {"timeout": limit, "connect_timeout": min(limit, timedelta(seconds=5))}
    for name in _S3_SERVERS:
        server = os.environ.get(name, "")
        if server.startswith("http://"):
            client["allow_http"] = True  # Allow plain HTTP only for an http:// address.
        elif server and not server.startswith("https://"):
            raise ValueError(f"{name} is not a server address: expected http://... or https://...")
    retry: RetryConfig = {
        "max_retries": retries,
        "retry_timeout": limit,
        "backoff": {"init_backoff": least, "max_backoff": most, "base": 2},
    }
    try:
        return from_url(url, client_options=client, retry_config=retry)
    except (BaseError, OSError, ValueError) as error:
        raise ValueError(f"Cannot open a store at {url}: {reason(error)}") from None
