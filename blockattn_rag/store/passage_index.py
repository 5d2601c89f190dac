"""Index of stored passages, used to recognize them in prompts without markers.

Each namespace has its own index, so that recognition reveals nothing about other tenants. The index
consists of immutable files in ``store.sidecar``, named by a digest of their content; each ``add``
writes at most one. A deleted passage that is still in the index is encoded again when recognized.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from blockattn_rag.errors import StoreError
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.recognition import ENTRY, Entries, PassageMatcher, checked, joined
from blockattn_rag.store.base import EntryInfo, KVStore, MaintainedStore, Sidecar, is_damage
from blockattn_rag.store.concurrency import Readers
from blockattn_rag.store.maintenance import describe_all
from blockattn_rag.store.namespaces import Access

logger = logging.getLogger("blockattn_rag")

_FOLDER = "passages-1"  # The name contains the format version.
_SUFFIX = ".safetensors"
_ATTEMPTS = 3  # A merge may delete files after they were listed.
_MOST_ENTRIES = 1 << 22  # Maximum number of entries in memory, over all namespaces.
_MOST_NAMESPACES = 1 << 10
_PATIENCE_S = 0.2
_THREADS = 2


class PassageIndex:
    """Index of stored passages. Thread-safe.

    Args:
        refresh_s: Minimum seconds between two searches for index files of other processes.
        in_background: Whether ``split`` waits at most 0.2 s for new files. Until they are read,
            only passages from earlier files are recognized. If False, it waits without a limit.

    Example::

        index = PassageIndex(store)
        spans = index.split(spans, Access(namespace))  # then BlockPrompt.from_spans(spans)
    """

    def __init__(
        self, store: KVStore, *, refresh_s: float = 5.0, in_background: bool = False
    ) -> None:
        if (sidecar := store.sidecar) is None:
            raise ValueError(
                f"{store!r} cannot store a passage index: use a folder, an object store, or a "
                "TieredStore with one of them as its home"
            )
        self.sidecar = sidecar
        self._refresh_s = refresh_s
        self._patience_s = _PATIENCE_S if in_background else None
        self._readers = Readers(_THREADS, "blockattn-rag-index")
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, _NamespaceIndex] = OrderedDict()

    def split(
        self, spans: Iterable[Span], access: Access, *, in_system: bool = False
    ) -> tuple[Span, ...]:
        """Split known passages out of a prompt; see ``PassageMatcher.split``.

        May read new index files, so async code should call it in a thread. If they cannot be read,
        the error is logged, and the entries in memory are used.
        """
        first, *others = map(self._matcher, access.namespaces(private=False))
        return first.split(spans, *others, in_system=in_system)

    def add(self, entries: Entries, namespace: str) -> int:
        """Add index entries (``entries_of``) of stored passages. Returns the number of new ones."""
        return self._index(namespace).add(entries)

    def _matcher(self, namespace: str) -> PassageMatcher:
        """Return a namespace's matcher. After the first read, only the caller that starts a new one
        waits for it."""
        index = self._index(namespace)
        with self._lock:
            starts = index.is_due and (index.read is None or index.read.done())
            if starts:
                index.read = self._readers.start(index.refresh_or_log)
        must_wait = self._patience_s is None and not index.was_read
        if index.read is not None and (starts or must_wait):
            wait([index.read], self._patience_s)
        return index.matcher

    def _index(self, namespace: str) -> _NamespaceIndex:
        """Return a namespace's index. Evicts the least recently used ones if there are too many."""
        with self._lock:
            index = self._loaded.pop(namespace, None)
            index = index or _NamespaceIndex(self.sidecar, namespace, self._refresh_s)
            self._loaded[namespace] = index
            entries = sum(len(loaded.matcher) for loaded in self._loaded.values())
            while len(self._loaded) > 1 and (
                entries > _MOST_ENTRIES or len(self._loaded) > _MOST_NAMESPACES
            ):
                _, dropped = self._loaded.popitem(last=False)
                entries -= len(dropped.matcher)
            return index


class _NamespaceIndex:
    """Index of one namespace: names of the files read so far, and a matcher for their entries. The
    matcher is replaced, never modified, so it can be used without a lock."""

    def __init__(self, sidecar: Sidecar, namespace: str, refresh_s: float = 0) -> None:
        self._sidecar = sidecar
        self._refresh_s = refresh_s
        self._folder = folder_of(namespace)
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        self._read_s = -math.inf
        self.was_read = False
        self.read: Future[None] | None = None
        self.matcher = PassageMatcher(np.empty(0, ENTRY))

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._read_s >= self._refresh_s

    def refresh(self) -> None:
        """Read new files, at most every ``refresh_s`` seconds."""
        with self._lock:
            if self.is_due:
                self._read_s = time.monotonic()
                self._read_new()
                self.was_read = True

    def refresh_or_log(self) -> None:
        try:
            self.refresh()
        except StoreError as error:
            logger.warning("Cannot read the passage index: %s", error)
        except Exception as error:
            logger.exception("Unexpected error while reading the passage index: %s", error)

    def add(self, entries: Entries) -> int:
        """Write entries that are not indexed yet to a new file. Returns their number."""
        self.refresh()
        with self._lock:
            fresh = joined([entries])
            fresh = fresh[~self.matcher.has(fresh)]
            if len(fresh):
                name = self._write(fresh)
                self._use(self._names | {name}, [self.matcher.entries, fresh])
            return len(fresh)

    def merge(self, stored: set[bytes] | None, added: Entries) -> tuple[int, int]:
        """Merge the files and ``added`` into one file, dropping entries whose handles are not in
        ``stored`` (None: drop none). Returns the numbers of kept and dropped entries."""
        with self._lock:
            entries = joined([self.matcher.entries, added])
            kept = entries
            if stored is not None:
                kept = entries[[handle.tobytes() in stored for handle in entries["handle"]]]
            names = frozenset([self._write(kept)] if len(kept) else [])
            for name in self._names - names:
                self._sidecar.delete(f"{self._folder}/{name}")
            self._use(names, [kept])
            return len(kept), len(entries) - len(kept)

    def _read_new(self) -> None:
        for _ in range(_ATTEMPTS):
            listed = frozenset(self._sidecar.names(self._folder))
            is_grown = self._names <= listed
            new = sorted(listed - self._names if is_grown else listed)
            contents = self._sidecar.read([f"{self._folder}/{name}" for name in new]) if new else []
            if None not in contents:
                break
        parts = {
            name: _decoded(name, content)
            for name, content in zip(new, contents, strict=True)
            if content is not None
        }
        if not is_grown:  # The files were merged.
            self._use(frozenset(parts), [*parts.values()])
        elif parts:
            self._use(self._names | parts.keys(), [self.matcher.entries, *parts.values()])

    def _write(self, entries: Entries) -> str:
        columns = {name: np.ascontiguousarray(entries[name]) for name in ENTRY.names or ()}
        content = save(columns)
        name = f"{_digest(content)}{_SUFFIX}"
        self._sidecar.write(f"{self._folder}/{name}", content)
        return name

    def _use(self, names: frozenset[str], parts: list[Entries]) -> None:
        self._names = names
        self.matcher = PassageMatcher(np.concatenate([np.empty(0, ENTRY), *parts]))


class IndexReport(NamedTuple):
    """Result of ``merge_index``: numbers of passages in the index and of dropped passages."""

    passages: int
    dropped: int


def merge_index(
    store: MaintainedStore,
    added: Mapping[str, Entries] = MappingProxyType({}),
    progress: Callable[[int], None] | None = None,
) -> IndexReport:
    """Merge the index files of each namespace, and drop passages that are not stored.

    Safe to run alongside writers. In a namespace with store entries without a handle (see ``gc``),
    no passage is dropped, because these entries may belong to any passage. The same applies to all
    namespaces if the store fails to describe an entry.

    Args:
        added: Index entries to add, by namespace.
        progress: Called with the number of store entries processed so far.
    """
    sidecar = PassageIndex(store).sidecar
    names = {bytes.fromhex(path.partition("/")[0][1:]).decode() for path in sidecar.names(_FOLDER)}
    indexes = {name: _NamespaceIndex(sidecar, name) for name in sorted(names | added.keys())}
    for index in indexes.values():
        # Read the index before the entries, because passages are added after their entries.
        index.refresh()
    stored: dict[str, set[bytes]] = {name: set() for name in indexes}
    unknown: set[str] = set()
    for done, (_, info) in enumerate(describe_all(store), start=1):
        if isinstance(info, StoreError) and not is_damage(info):
            logger.warning("No passage is dropped from the index, because a read failed: %s", info)
            unknown.update(indexes)
        if not isinstance(info, EntryInfo):
            continue
        if (namespace := info.header.namespace) in indexes:
            stored[namespace] |= {bytes.fromhex(handle) for handle in info.handles}
            if not info.handles:
                unknown.add(namespace)
        if progress is not None:
            progress(done)
    passages = dropped = 0
    for name, index in indexes.items():
        handles = None if name in unknown else stored[name]
        kept, gone = index.merge(handles, added.get(name, np.empty(0, ENTRY)))
        passages, dropped = passages + kept, dropped + gone
    return IndexReport(passages, dropped)


def folder_of(namespace: str) -> str:
    """Return the folder of a namespace's files, unique even on case-insensitive file systems."""
    return f"{_FOLDER}/n{namespace.encode().hex()}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _decoded(name: str, content: bytes) -> Entries:
    """Decode the entries of an index file. A damaged file is logged and counts as empty."""
    try:
        if _digest(content) != name.removesuffix(_SUFFIX):
            raise ValueError("its content does not match its name")
        columns = load(content)
        entries = np.empty(len(columns["chars"]), ENTRY)
        for column in ENTRY.names or ():
            entries[column] = columns[column]
        return checked(entries)
    except (SafetensorError, ValueError, KeyError) as error:
        logger.warning("The index file %s is damaged: %s; `store index` rebuilds it", name, error)
        return np.empty(0, ENTRY)
