"""Store maintenance: verification of entries, and deletion of unreferenced entries.

Entries are processed in parallel while the store is being listed. Memory use and report size do not
grow with the store.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from blockattn_rag.errors import StoreError
from blockattn_rag.store.base import EntryInfo, MaintainedStore, StoredEntry, age_s, is_damage
from blockattn_rag.store.namespaces import is_of

T = TypeVar("T")
R = TypeVar("R")

GRACE_S = 3600.0
"""Default grace period of ``gc`` in seconds. Protects blocks whose passages are not added yet."""

MOST_NAMES = 100
"""Maximum number of names in a ``Tally``."""

_HEADERS_AT_ONCE = 16
_WHOLE_AT_ONCE = 4  # Complete entries are read into memory.


@dataclass(slots=True)
class Tally:
    """Number of entries or files, and the first ``MOST_NAMES`` of them with reasons.

    The keys of ``first`` are store keys, or paths of temporary files.
    """

    count: int = 0
    first: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, text: str) -> None:
        self.count += 1
        if len(self.first) < MOST_NAMES:
            self.first[name] = text

    def __bool__(self) -> bool:
        return self.count > 0


@dataclass(slots=True)
class VerifyReport:
    """Result of ``verify``.

    Args:
        ok: Number of intact entries.
        total_bytes: Total size of the intact entries, as stored.
        skipped: Number of entries outside the sample.
        damaged: Unusable entries, including deleted ones, with reasons.
        unread: Entries that could not be read, for example because of missing permissions or
            insufficient memory. They may be intact, and are never deleted.
        deleted: Number of damaged entries that were deleted.
        errors: Damaged entries that could not be deleted, with reasons.
        leftovers: Temporary files of running or killed writers. ``gc`` deletes old ones.
    """

    ok: int = 0
    total_bytes: int = 0
    skipped: int = 0
    damaged: Tally = field(default_factory=Tally)
    unread: Tally = field(default_factory=Tally)
    deleted: int = 0
    errors: Tally = field(default_factory=Tally)
    leftovers: Tally = field(default_factory=Tally)


@dataclass(slots=True)
class GcReport:
    """Result of ``gc``. With ``dry_run``, the result that a real run would have.

    Args:
        kept: Number of kept entries that are referenced or have no handle.
        kept_young: Number of unreferenced entries that were kept because of the grace period.
        deleted: Deleted entries, including expired ones, with reasons.
        expired: Number of deleted entries that were referenced or had no handle, but had not been
            used for ``ttl_s``.
        freed_bytes: Total size of deleted entries and temporary files.
        leftovers: Deleted temporary files.
        errors: Entries and files that could not be read or deleted, with reasons.
        dry_run: Whether entries and files were only reported, not deleted.
        other: Number of entries that were ignored because they are in other namespaces.
    """

    kept: int = 0
    kept_young: int = 0
    deleted: Tally = field(default_factory=Tally)
    expired: int = 0
    freed_bytes: int = 0
    leftovers: Tally = field(default_factory=Tally)
    errors: Tally = field(default_factory=Tally)
    dry_run: bool = False
    other: int = 0


class _Verdict(NamedTuple):
    """Result of ``verify`` or ``gc`` for one entry."""

    key: str
    outcome: str = "gone"
    nbytes: int = 0  # Size of an intact or deleted entry.
    reason: str = ""  # Why the entry is damaged, could not be read, or was deleted.
    error: str = ""  # Why the entry could not be checked or deleted.


def verify(
    store: MaintainedStore,
    progress: Callable[[int], None] | None = None,
    *,
    delete_damaged: bool = False,
    sample: float = 1.0,
    seed: int = 0,
    on_damage: Callable[[str, str], None] | None = None,
) -> VerifyReport:
    """Read and verify complete entries. Safe to run alongside readers and writers.

    Does not count as a use of the entries.

    Args:
        progress: Called after each entry with the number of entries checked so far.
        delete_damaged: Whether to delete damaged entries, so that a later ingestion encodes them
            again. Entries that were used or replaced in the meantime are kept.
        sample: Fraction of the entries to read, more than 0 and at most 1. Keys are divided into
            ``ceil(1 / sample)`` parts, and one of them is read.
        seed: Number of the part to read. Runs with consecutive seeds, one per part, read them all.
        on_damage: Called with the key and the reason of each damaged or unreadable entry. The
            report names only the first ``MOST_NAMES``.

    Raises:
        StoreError: The store cannot be listed.
        ValueError: ``sample`` is out of range.
    """
    if not 0 < sample <= 1:
        raise ValueError(f"sample must be more than 0 and at most 1, found {sample!r}")
    parts = math.ceil(1 / sample - 1e-9)  # The epsilon absorbs rounding errors.
    report = VerifyReport()

    def sampled() -> Iterator[StoredEntry]:
        for entry in store.entries():  # Parts have similar sizes, as keys are digests.
            if int(entry.key[-15:], 16) * parts >> 60 == seed % parts:
                yield entry
            else:
                report.skipped += 1

    verdicts = _at_once(partial(_check, store, delete_damaged), sampled(), _WHOLE_AT_ONCE)
    for done, verdict in enumerate(verdicts, start=1):
        report.ok += verdict.outcome == "ok"
        report.deleted += verdict.outcome == "deleted"
        report.total_bytes += verdict.nbytes
        if verdict.reason:
            tally = report.unread if verdict.outcome == "unread" else report.damaged
            tally.add(verdict.key, verdict.reason)
            if on_damage is not None:
                on_damage(verdict.key, verdict.reason)
        if verdict.error:
            report.errors.add(verdict.key, verdict.error)
        if progress is not None:
            progress(done)
    for path in store.leftovers():
        report.leftovers.add(str(path), "temporary file")
    return report


def _check(store: MaintainedStore, delete_damaged: bool, entry: StoredEntry) -> _Verdict:
    key = entry.key
    try:
        if store.peek(key) is not None and (info := store.describe(key)):
            return _Verdict(key, "ok", info.nbytes)
        return _Verdict(key)
    except StoreError as error:
        reason = str(error)
        if not is_damage(error):
            return _Verdict(key, "unread", reason=reason)
    if not delete_damaged:
        return _Verdict(key, "damaged", reason=reason)
    try:
        deleted = store.discard(key, entry.used_ns)
    except StoreError as error:
        return _Verdict(key, "damaged", reason=reason, error=str(error))
    return _Verdict(key, "deleted" if deleted else "damaged", reason=reason)


def gc(
    store: MaintainedStore,
    live_handles: Collection[str] | None,
    progress: Callable[[int], None] | None = None,
    *,
    grace_s: float = GRACE_S,
    ttl_s: float | None = None,
    namespaces: Collection[str] | None = None,
    dry_run: bool = False,
    force: bool = False,
) -> GcReport:
    """Delete unreferenced entries (mark and sweep).

    An entry is deleted if none of its handles is in ``live_handles``, and its last *use* was at
    least ``grace_s`` seconds ago. Writes, reads (recorded at most once a minute) and cache hits
    during ingestion count as uses. An entry that is used while ``gc`` runs is kept. If a deleted
    entry is needed later, its block is encoded again.

    Entries without a handle, which were encoded by a server or are shared by many texts, are
    deleted only by ``ttl_s``. Safe to run alongside an ingestion, except in object stores: they
    record only writes, so an old entry may be deleted that the ingestion reuses for a new passage.

    Args:
        live_handles: Handles (``Block.handle``) of all referenced blocks. None: all blocks count
            as referenced, so only ``ttl_s`` deletes entries.
        progress: Called after each entry with the number of entries processed so far.
        grace_s: Grace period in seconds. Must exceed the age of ``live_handles``, and the time from
            storing a block to adding its passage in an ingestion. 0 also deletes the temporary
            files of running writers, whose ``put`` then raises StoreError.
        ttl_s: Seconds after which unused entries are deleted, even if referenced. Default: never.
        namespaces: Namespaces to process, including their private blocks. Default: all namespaces.
        dry_run: Whether to report without deleting.
        force: Whether to allow an empty ``live_handles``, which may delete every entry that has a
            handle.

    Raises:
        StoreError: The store cannot be listed.
        ValueError: ``ttl_s`` is below ``grace_s``, or ``live_handles`` is empty without ``force``.
    """
    if live_handles is not None and not live_handles and not force:
        raise ValueError(
            "live_handles is empty, so every entry with a handle could be deleted: collect the "
            "handles from all vector stores that use this store, or pass force=True"
        )
    if ttl_s is not None and ttl_s < grace_s:
        raise ValueError(
            f"The time to live ({ttl_s:g} s) is shorter than the grace period ({grace_s:g} s), "
            "during which nothing is deleted; shorten the grace period too"
        )
    report = GcReport(dry_run=dry_run)

    def judge(key: str) -> _Verdict:
        try:
            if (info := store.describe(key)) is None:
                return _Verdict(key)
            if namespaces is not None and not is_of(info.header.namespace, namespaces):
                return _Verdict(key, "other")
            outcome, reason = _outcome(info, live_handles, grace_s, ttl_s)
            if not reason:
                return _Verdict(key, outcome)
            if dry_run or store.discard(key, info.used_ns):
                return _Verdict(key, outcome, info.nbytes, reason)
            return _Verdict(key)  # The entry was used in the meantime.
        except StoreError as error:
            return _Verdict(key, error=str(error))

    for done, verdict in enumerate(_at_once(judge, store.keys(), _HEADERS_AT_ONCE), start=1):
        report.kept += verdict.outcome == "kept"
        report.kept_young += verdict.outcome == "young"
        report.expired += verdict.outcome == "expired"
        report.other += verdict.outcome == "other"
        report.freed_bytes += verdict.nbytes
        if verdict.reason:
            report.deleted.add(verdict.key, verdict.reason)
        if verdict.error:
            report.errors.add(verdict.key, verdict.error)
        if progress is not None:
            progress(done)
    for path in store.leftovers():
        try:
            status = path.stat()
            if age_s(status.st_mtime_ns) < grace_s:
                continue
            if not dry_run:
                path.unlink()
            report.leftovers.add(str(path), "temporary file")
            report.freed_bytes += status.st_size
        except FileNotFoundError:  # The writer has finished.
            continue
        except OSError as error:
            report.errors.add(str(path), f"Cannot delete {path}: {error.strerror or error}")
    return report


def _outcome(
    info: EntryInfo, live_handles: Collection[str] | None, grace_s: float, ttl_s: float | None
) -> tuple[str, str]:
    # Entries without handles, such as those encoded by a server, are deleted only by `ttl_s`.
    is_live = (
        live_handles is None
        or not info.handles
        or any(handle in live_handles for handle in info.handles)
    )
    is_unused = ttl_s is not None and info.age_s >= ttl_s
    if is_live and not is_unused:
        return "kept", ""
    if info.age_s < grace_s:
        return "young", ""
    reason = "not used for ttl_s" if is_unused else "nothing refers to it"
    return ("expired" if is_live else "dead"), reason


def describe_all(store: MaintainedStore) -> Iterator[tuple[str, EntryInfo | StoreError | None]]:
    """Yield the key of each entry with its ``EntryInfo``, with None if it was deleted in the
    meantime, or with the StoreError if it cannot be read. Reads several entries concurrently."""

    def described(key: str) -> tuple[str, EntryInfo | StoreError | None]:
        try:
            return key, store.describe(key)
        except StoreError as error:
            return key, error

    return _at_once(described, store.keys(), _HEADERS_AT_ONCE)


def _at_once(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """Yield the results of ``work`` in order, prefetching at most ``2 * threads`` items."""
    items = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="blockattn-rag-maintenance") as pool:
        begun: deque[Future[R]] = deque(
            pool.submit(work, item) for item in itertools.islice(items, 2 * threads)
        )
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(work, item) for item in itertools.islice(items, 1))
            yield result
