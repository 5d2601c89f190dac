"""Index of the passages in a store, which finds them in prompts without markers.

Each namespace has its own index, so that recognition reveals nothing about other tenants. The index
consists of immutable files beside the entries (``store.sidecar``): each writer adds files, and
``compact`` merges them. A file is named after the digest of its content, which is verified.

An index entry whose passage was deleted is harmless: the passage is encoded again.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from blockattn_rag.errors import StoreError
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.recognition import ENTRY, Entries, PassageMatcher, checked, joined
from blockattn_rag.store.base import EntryInfo, KVStore, MaintainedStore, Sidecar
from blockattn_rag.store.maintenance import describe_all
from blockattn_rag.store.namespaces import Access

logger = logging.getLogger("blockattn_rag")

_FOLDER = "passages-1"  # with the version of the format
_SUFFIX = ".safetensors"
_ATTEMPTS = 3  # a compaction may delete files between their listing and their reading
_MOST_BYTES = 256 << 20  # index entries in memory, of the namespaces that were used last
_NAMESPACE_BYTES = 4096  # counted for a namespace, in addition to its entries
_PATIENCE_S = 0.2  # how long a prompt waits for an index that is read in the background
_THREADS = 2
_SMALL_PART = 8  # the entries of new files are merged when they exceed this part of the others


class PassageIndex:
    """Index of the passages in a store. Thread-safe.

    Args:
        refresh_s: Seconds for which passages that other processes add may stay unknown.
        in_background: Whether ``split`` waits at most 0.2 s for new files, which are read in the
            background. Until then, only the passages of earlier ones are found.

    Raises:
        ValueError: The store cannot keep an index.

    Example::

        index = PassageIndex(store)
        spans = index.split(spans, Access(namespace))  # then BlockPrompt.from_spans(spans)
    """

    def __init__(
        self, store: KVStore, *, refresh_s: float = 5.0, in_background: bool = False
    ) -> None:
        if (sidecar := store.sidecar) is None:
            raise ValueError(
                f"{store!r} cannot keep an index of passages: use a folder or an object store, or "
                "a TieredStore with one of them as its home"
            )
        self.sidecar = sidecar
        self._refresh_s = refresh_s
        self._threads = ThreadPoolExecutor(_THREADS) if in_background else None
        self._lock = threading.Lock()
        self._segments: OrderedDict[str, _Segments] = OrderedDict()
        self._sizes: dict[str, int] = {}  # bytes of the namespaces
        self._bytes = 0

    def split(
        self, spans: Iterable[Span], access: Access, *, in_system: bool = False
    ) -> tuple[Span, ...]:
        """Split known passages out of a prompt's text; see ``PassageMatcher.split``.

        Reads new index files at most every ``refresh_s`` seconds, so call it in a thread if the
        store is remote. If the index cannot be read, what was read before is used; this is logged.
        """
        names = access.namespaces(private=False)
        first, *others = (one for name in names for one in self._matchers(name))
        return first.split(spans, *others, in_system=in_system)

    def add(self, entries: Entries, namespace: str) -> int:
        """Add index entries (``entries_of``), after their passages were stored.

        Returns:
            Number of entries that were new.

        Raises:
            StoreError: The index cannot be written.
        """
        segments = self._known(namespace)
        with segments.lock:
            segments.refresh(self._refresh_s)
            fresh = joined([entries])
            segments.make()
            for matcher in segments.made:
                fresh = fresh[~matcher.has(fresh)]
            if len(fresh):
                segments.write(fresh)
        self._count(namespace, segments)
        return len(fresh)

    def _matchers(self, namespace: str) -> tuple[PassageMatcher, ...]:
        segments = self._known(namespace)
        if self._threads is None:
            self._update(namespace, segments)
        elif segments.is_due(self._refresh_s) and not segments.is_updating:
            segments.is_updating = True
            update = self._threads.submit(self._update_logged, namespace, segments)
            with suppress(TimeoutError):
                update.result(_PATIENCE_S)
        return segments.made

    def _update_logged(self, namespace: str, segments: _Segments) -> None:
        try:
            self._update(namespace, segments)
        except Exception as error:
            logger.exception("Unexpected error while the index of passages is read: %s", error)

    def _update(self, namespace: str, segments: _Segments) -> None:
        """Files are read and matchers are made outside of the lock, which all tenants share."""
        try:
            if segments.lock.acquire(blocking=not segments.was_read):  # else another thread reads
                try:
                    segments.refresh(self._refresh_s)
                except StoreError as error:
                    logger.warning("The index of passages cannot be read: %s", error)
                finally:
                    segments.lock.release()
            segments.make()
            self._count(namespace, segments)
        finally:
            segments.is_updating = False

    def _known(self, namespace: str) -> _Segments:
        with self._lock:
            segments = self._segments.pop(namespace, None) or _Segments(self.sidecar, namespace)
            self._segments[namespace] = segments
        return segments

    def _count(self, namespace: str, segments: _Segments) -> None:
        """Count the bytes of a namespace, and forget the least recently used namespaces."""
        with self._lock:
            if self._segments.get(namespace) is not segments:
                return  # was forgotten meanwhile
            size = _NAMESPACE_BYTES + sum(part.nbytes for part in segments.parts.values())
            self._bytes += size - self._sizes.get(namespace, 0)
            self._sizes[namespace] = size
            while self._bytes > _MOST_BYTES and len(self._segments) > 1:
                oldest, _ = self._segments.popitem(last=False)
                self._bytes -= self._sizes.pop(oldest, 0)


class IndexReport(NamedTuple):
    """Result of ``compact``: number of passages in the index, and of passages dropped from it."""

    passages: int
    dropped: int


def compact(
    store: MaintainedStore,
    added: Mapping[str, Entries] = MappingProxyType({}),
    progress: Callable[[int], None] | None = None,
) -> IndexReport:
    """Merge the index files of each namespace, and drop passages that are no longer stored.

    Safe to run alongside writers. Entries that a server encoded have no handle, so a namespace with
    such entries keeps all of its passages.

    Args:
        added: Index entries to add, by namespace.
        progress: Called with the number of entries read.

    Raises:
        StoreError: The store or its index cannot be read or written.
        ValueError: The store cannot keep an index.
    """
    sidecar = PassageIndex(store).sidecar
    names = {bytes.fromhex(path.partition("/")[0][1:]).decode() for path in sidecar.names(_FOLDER)}
    # The index is read before the entries: a passage is added after its entry was stored.
    indexes = {name: _Segments(sidecar, name) for name in sorted(names | added.keys())}
    for segments in indexes.values():
        segments.refresh(0)
    stored: dict[str, set[bytes]] = {name: set() for name in indexes}
    unknown: set[str] = set()
    for done, (_, info) in enumerate(describe_all(store), start=1):
        if not isinstance(info, EntryInfo) or info.header.is_outdated:
            continue
        if info.header.namespace in indexes:
            stored[info.header.namespace] |= {bytes.fromhex(one) for one in info.handles}
            if not info.handles:
                unknown.add(info.header.namespace)
        if progress is not None:
            progress(done)
    passages = dropped = 0
    for name, segments in indexes.items():
        entries = joined([*segments.parts.values(), added.get(name, np.empty(0, ENTRY))])
        is_stored = [name in unknown or one.tobytes() in stored[name] for one in entries["handle"]]
        kept = entries[np.array(is_stored, np.bool_)]
        segments.replace(kept)
        passages, dropped = passages + len(kept), dropped + len(entries) - len(kept)
    return IndexReport(passages, dropped)


class _Segments:
    """Index files of a namespace, as far as they were read.

    ``lock`` must be held to read and write files. ``parts`` is replaced as a whole, so using it
    needs no lock.
    """

    def __init__(self, sidecar: Sidecar, namespace: str) -> None:
        self.lock = threading.Lock()
        self._sidecar = sidecar
        self._folder = folder_of(namespace)
        self._read_s: float | None = None
        self.is_updating = False
        self.parts: dict[str, Entries] = {}
        self._making = threading.Lock()
        self._made = _Matchers.of({})

    @property
    def was_read(self) -> bool:
        return self._read_s is not None

    @property
    def made(self) -> tuple[PassageMatcher, ...]:
        """Matchers of the files, as far as they were made."""
        made = self._made
        return made.large, made.small

    def make(self) -> None:
        """Make the matchers of new files. While a thread makes them, others use the made ones."""
        if self._made.parts is not self.parts and self._making.acquire(
            blocking=not self._made.parts
        ):
            try:
                self._made = self._made.updated(self.parts)
            finally:
                self._making.release()

    def is_due(self, every_s: float) -> bool:
        """Whether the files were not read for this time."""
        return self._read_s is None or time.monotonic() - self._read_s >= every_s

    def refresh(self, every_s: float) -> None:
        """Read new files, at most every ``every_s`` seconds."""
        if not self.is_due(every_s):
            return
        self._read_s = time.monotonic()
        for _ in range(_ATTEMPTS):
            listed = self._sidecar.names(self._folder)
            new = [name for name in listed if name not in self.parts]
            paths = [f"{self._folder}/{name}" for name in new]
            contents = self._sidecar.read(paths) if paths else []
            if new or len(listed) != len(self.parts):
                kept = {name: part for name, part in self.parts.items() if name in listed}
                for name, content in zip(new, contents, strict=True):
                    if content is not None:
                        kept[name] = _decoded(name, content)
                self.parts = kept
            if None not in contents:
                return

    def write(self, entries: Entries) -> None:
        """Add a file."""
        name, content = _encoded(entries)
        self._sidecar.write(f"{self._folder}/{name}", content)
        self.parts = {**self.parts, name: entries}

    def replace(self, entries: Entries) -> None:
        """Replace the files that were read by one file, or by none if there are no entries."""
        old = [*self.parts]
        if len(entries):
            self.write(entries)
        for name in old:
            if not len(entries) or name != _encoded(entries)[0]:
                self._sidecar.delete(f"{self._folder}/{name}")


def folder_of(namespace: str) -> str:
    """Folder of a namespace's index files. Differs on file systems that ignore case, too."""
    return f"{_FOLDER}/n{namespace.encode().hex()}"


class _Matchers(NamedTuple):
    """Matchers of index files: a large one, and a small one of new files, which is quick to make.

    Args:
        parts: The files.
        merged: Names of the files in the large matcher.
    """

    parts: dict[str, Entries]
    merged: frozenset[str]
    large: PassageMatcher
    small: PassageMatcher

    @classmethod
    def of(cls, parts: dict[str, Entries]) -> _Matchers:
        large = PassageMatcher(np.concatenate([np.empty(0, ENTRY), *parts.values()]))
        return cls(parts, frozenset(parts), large, PassageMatcher(np.empty(0, ENTRY)))

    def updated(self, parts: dict[str, Entries]) -> _Matchers:
        """Matchers of other files. Merges all of them if many are new, or some were deleted."""
        if parts is self.parts:
            return self
        new = [part for name, part in parts.items() if name not in self.merged]
        if sum(map(len, new)) * _SMALL_PART > len(self.large) or not self.merged <= parts.keys():
            return _Matchers.of(parts)
        small = PassageMatcher(np.concatenate([np.empty(0, ENTRY), *new]))
        return self._replace(parts=parts, small=small)


def _encoded(entries: Entries) -> tuple[str, bytes]:
    """Name and content of an index file."""
    names = ENTRY.names or ()
    content = save({name: np.ascontiguousarray(entries[name]) for name in names})
    return f"{hashlib.sha256(content).hexdigest()[:32]}{_SUFFIX}", content


def _decoded(name: str, content: bytes) -> Entries:
    """Entries of an index file. A damaged file counts as empty, and is logged."""
    try:
        if hashlib.sha256(content).hexdigest()[:32] != name.removesuffix(_SUFFIX):
            raise ValueError("its content does not match its name")
        columns = load(content)
        entries = np.empty(len(columns["chars"]), ENTRY)
        for column in ENTRY.names or ():
            entries[column] = columns[column]
        return checked(entries)
    except (SafetensorError, ValueError, KeyError) as error:
        logger.warning("The index file %s is damaged: %s; `store index` rebuilds it", name, error)
        return np.empty(0, ENTRY)
