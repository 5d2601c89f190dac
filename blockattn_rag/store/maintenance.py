"""Looking after a store: damaged entries, entries that nothing refers to, its size.

Entries are judged as they are listed, several at once, and forgotten: what this takes of memory
does not grow with the store.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.store import eviction
from blockattn_rag.store.base import EntryInfo, MaintainedStore, check_max_bytes
from blockattn_rag.store.directory import DirectoryStore
from blockattn_rag.store.files import age_s, explained, remove_unused
from blockattn_rag.store.namespaces import is_of
from blockattn_rag.store.reports import GcReport, ShrinkReport, Tally, VerifyReport

T = TypeVar("T")
R = TypeVar("R")

GRACE_S = 3600.0
"""How long ``gc`` leaves entries alone that were used: ingestion stores first, refers later."""

_HEADERS_AT_ONCE = 16
_WHOLE_AT_ONCE = 4  # each is in memory whole


class _Check(NamedTuple):
    """What ``verify`` found of an entry. ``reason``: why it is not sound."""

    key: str
    nbytes: int = 0
    sound: bool = False
    reason: str = ""
    unread: bool = False
    deleted: bool = False
    error: str = ""


class _Verdict(NamedTuple):
    """What ``gc`` did with an entry."""

    key: str
    other: bool = False
    kept: bool = False
    young: bool = False
    deleted: str = ""
    expired: bool = False
    nbytes: int = 0
    error: str = ""


def verify(
    store: MaintainedStore,
    progress: Callable[[int], None] | None = None,
    *,
    delete_damaged: bool = False,
    sample: float = 1.0,
    seed: int = 0,
    found: Callable[[str, str], None] | None = None,
) -> VerifyReport:
    """Read entries whole and check them. Safe beside readers and writers; counts as no use.

    Args:
        progress: called with the number of entries done after each one.
        delete_damaged: delete what is damaged, so that a later ingestion computes it anew. What
            was put anew since it was read stays.
        sample: the share of the entries to read, more than 0, up to 1. Entries are divided by
            their keys into ``ceil(1 / sample)`` parts.
        seed: which of the parts; counting it up reads each entry once in so many runs.
        found: called with the key and the reason of each entry that is damaged or could not be
            read; the report names only the first.

    Raises:
        StoreError: the store cannot be listed.
        ValueError: ``sample`` is no share.
    """
    chosen = _part(sample, seed)
    ok = total_bytes = skipped = deleted = 0
    damaged, unread, errors = Tally(), Tally(), Tally()

    def wanted() -> Iterator[tuple[str, int | None]]:
        nonlocal skipped
        for listed in _listed(store):
            if chosen(listed[0]):
                yield listed
            else:
                skipped += 1

    check = partial(_check, store, delete_damaged)
    for done, one in enumerate(_at_once(check, wanted(), _WHOLE_AT_ONCE), start=1):
        ok += one.sound
        total_bytes += one.nbytes
        deleted += one.deleted
        if one.reason:
            (unread if one.unread else damaged).add(one.key, one.reason)
            if found is not None:
                found(one.key, one.reason)
        if one.error:
            errors.add(one.key, one.error)
        if progress is not None:
            progress(done)
    leftovers = Tally()
    if isinstance(store, DirectoryStore):
        for path in store.leftovers():
            leftovers.add(str(path), "temporary file")
    return VerifyReport(ok, total_bytes, skipped, damaged, unread, deleted, errors, leftovers)


def gc(
    store: MaintainedStore,
    live_handles: Container[str] | None,
    progress: Callable[[int], None] | None = None,
    *,
    grace_s: float = GRACE_S,
    ttl_s: float | None = None,
    fingerprint: str | None = None,
    namespaces: Collection[str] | None = None,
    dry_run: bool = False,
    deleted: Callable[[str], None] | None = None,
) -> GcReport:
    """Delete entries that nothing refers to: mark and sweep. Safe beside a running ingestion.

    An entry goes if none of its handles is among ``live_handles`` and it was last *used* more than
    ``grace_s`` ago: written, read (known to a minute) or found present by an ingestion. One that
    is used while this runs stays. A time of use in the future, from a clock that is wrong, counts
    as that long ago. What is deleted although someone needs it costs one computation, never an
    answer.

    Texts of equal tokens share an entry, which names all that were ingested (``store.claims``).
    Entries without a handle, which a server has encoded (``serving``) or many texts share, go by
    ``ttl_s`` alone.

    An object store knows no use but writing (``ObjectStore``): there, an old entry that an
    ingestion found present and refers to only after ``live_handles`` were read may go.

    Args:
        live_handles: ``BlockKV.handle`` of every block still referred to: a set, or a
            ``LiveHandles``. None if age alone decides, by ``ttl_s``.
        progress: called with the number of entries done after each one.
        grace_s: seconds; longer than the longest ingestion may take between storing a block and
            referring to it, and than ``live_handles`` are old. 0 also takes the temporary files of
            writers at work, whose ``put`` then raises StoreError.
        ttl_s: seconds; what was not used for that long goes even if it is referred to.
        fingerprint: if given, entries of any other model are taken as not referred to, whatever
            their handle. None judges by handle alone.
        namespaces: if given, entries of any other are left alone: what tenants share a store with
            is not theirs to judge. Each name stands for the texts of its users, too.
        dry_run: delete nothing, only tell.
        deleted: called with the key of each entry that is deleted; the report names only the first.

    Raises:
        StoreError: the store cannot be listed.
        ValueError: ``ttl_s`` is less than ``grace_s``, or missing where ``live_handles`` are.
    """
    _check_ages(live_handles, grace_s, ttl_s)

    def judge(key: str) -> _Verdict:
        try:
            info = store.describe(key)
            if info is None:
                return _Verdict(key)
            if namespaces is not None and not is_of(info.namespace, namespaces):
                return _Verdict(key, other=True)
            # A server encodes tokens, and does not know of which passage they are.
            named = info.handles
            live = live_handles is None or not named or any(one in live_handles for one in named)
            live = live and fingerprint in (None, info.fingerprint)
            expired = ttl_s is not None and info.age_s >= ttl_s
            if live and not expired:
                return _Verdict(key, kept=True)
            if info.age_s < grace_s:
                return _Verdict(key, young=True)
            if dry_run or store.discard(key, info.used_ns):
                reason = "not used for ttl_s" if expired else "nothing refers to it"
                return _Verdict(key, deleted=reason, expired=live, nbytes=info.nbytes)
        except StoreError as error:
            return _Verdict(key, error=str(error))
        return _Verdict(key)

    kept = kept_young = other = expired = freed_bytes = 0
    gone, errors = Tally(), Tally()
    for done, one in enumerate(_at_once(judge, store.keys(), _HEADERS_AT_ONCE), start=1):
        other += one.other
        kept += one.kept
        kept_young += one.young
        expired += one.expired
        freed_bytes += one.nbytes
        if one.deleted:
            gone.add(one.key, one.deleted)
            if deleted is not None:
                deleted(one.key)
        if one.error:
            errors.add(one.key, one.error)
        if progress is not None:
            progress(done)
    leftovers = Tally()
    if isinstance(store, DirectoryStore):
        freed_bytes += _sweep_leftovers(store, grace_s, dry_run, leftovers, errors)
    return GcReport(kept, kept_young, gone, expired, freed_bytes, leftovers, errors, dry_run, other)


def shrink(store: DirectoryStore, max_bytes: int, *, dry_run: bool = False) -> ShrinkReport:
    """Delete entries, least recently used first, until the others take at most ``max_bytes``.

    For once; ``DirectoryStore(path, max_bytes=...)`` keeps a store within a size. What is deleted
    is computed anew when it is needed. Temporary files are not counted, and stay.

    Raises:
        StoreError: the store cannot be listed, or an entry cannot be deleted.
        ValueError: ``max_bytes`` is not positive.
    """
    check_max_bytes(max_bytes)
    remove = (lambda _path, _used_ns: True) if dry_run else remove_unused
    with explained("delete from", store.path):
        left_bytes, deleted = eviction.shrink(store.files(), max_bytes, remove=remove)
    freed_bytes = sum(file.nbytes for file in deleted)
    return ShrinkReport(left_bytes, tuple(file.path.stem for file in deleted), freed_bytes, dry_run)


def describe_all(store: MaintainedStore) -> Iterator[tuple[str, EntryInfo | StoreError | None]]:
    """What each entry's header says (``describe``), as they are listed; several are read at once.

    An entry that goes meanwhile is None.
    """

    def described(key: str) -> tuple[str, EntryInfo | StoreError | None]:
        try:
            return key, store.describe(key)
        except StoreError as error:
            return key, error

    return _at_once(described, store.keys(), _HEADERS_AT_ONCE)


def _check(store: MaintainedStore, delete_damaged: bool, listed: tuple[str, int | None]) -> _Check:
    """Read an entry, and delete it if it is damaged and that is wanted."""
    key, used_ns = listed
    try:
        if store.peek(key) is not None and (info := store.describe(key)):
            return _Check(key, info.nbytes, sound=True)
    except (CorruptEntryError, FingerprintMismatchError) as error:
        reason = str(error)
        if not delete_damaged:
            return _Check(key, reason=reason)
        try:  # what is no regular file has no time of use
            deleted = store.delete(key) if used_ns is None else store.discard(key, used_ns)
            return _Check(key, reason=reason, deleted=deleted)
        except StoreError as failure:
            return _Check(key, reason=reason, error=str(failure))
    except StoreError as error:
        return _Check(key, reason=str(error), unread=True)
    return _Check(key)


def _listed(store: MaintainedStore) -> Iterator[tuple[str, int | None]]:
    """Every entry's key and time of use; None for what is no regular file."""
    if not isinstance(store, DirectoryStore):
        for entry in store.entries():
            yield entry.key, entry.used_ns
        return
    for key in store.keys():  # noqa: SIM118 - a store is no dict
        try:
            used_ns = store.used_ns(key)
        except StoreError:  # reading it tells why
            used_ns = None
        yield key, used_ns


def _part(sample: float, seed: int) -> Callable[[str], bool]:
    """Whether a key is in the part of all keys that is meant. Keys are digests: spread evenly."""
    if not 0 < sample <= 1:
        raise ValueError(f"sample must be more than 0 and at most 1, found {sample!r}")
    parts = math.ceil(1 / sample - 1e-9)  # 1 / 0.1 and its like are whole numbers
    return lambda key: int(key[-15:], 16) * parts >> 60 == seed % parts


def _check_ages(live_handles: object, grace_s: float, ttl_s: float | None) -> None:
    if ttl_s is None:
        if live_handles is None:
            raise ValueError("expected live_handles or ttl_s: every entry would be kept")
    elif ttl_s < grace_s:
        raise ValueError(
            f"the time to live ({ttl_s:g} s) is shorter than the grace period ({grace_s:g} s), "
            "within which nothing is deleted; shorten that too"
        )


def _at_once(work: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """What ``work`` makes of each item, in order. Only a few more are begun than threads work."""
    items = iter(items)
    with ThreadPoolExecutor(threads, thread_name_prefix="blockattn-rag-maintenance") as pool:
        begun: deque[Future[R]] = deque(
            pool.submit(work, item) for item in itertools.islice(items, 2 * threads)
        )
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(work, item) for item in itertools.islice(items, 1))
            yield result


def _sweep_leftovers(
    store: DirectoryStore, grace_s: float, dry_run: bool, leftovers: Tally, errors: Tally
) -> int:
    """Delete old temporary files; what they took, in bytes."""
    freed_bytes = 0
    for path in store.leftovers():
        try:
            status = path.stat()
            if age_s(status.st_mtime_ns) < grace_s:
                continue
            if not dry_run:
                path.unlink()
            leftovers.add(str(path), "temporary file")
            freed_bytes += status.st_size
        except FileNotFoundError:  # its writer has finished
            continue
        except OSError as error:
            errors.add(str(path), f"cannot delete {path}: {error.strerror or error}")
    return freed_bytes
