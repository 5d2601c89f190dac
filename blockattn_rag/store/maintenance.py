"""Looking after a store on disk: damaged entries, entries that nothing refers to, its size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from blockattn_rag.errors import CorruptEntryError, FingerprintMismatchError, StoreError
from blockattn_rag.store import eviction
from blockattn_rag.store.base import check_max_bytes
from blockattn_rag.store.directory import DirectoryStore
from blockattn_rag.store.files import age_s, explained, remove_unused

GRACE_S = 3600.0
"""How long ``gc`` leaves entries alone that were used: ingestion stores first, refers later."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Args:
        ok: undamaged entries.
        total_bytes: their files' sizes.
        damaged: key and reason of each entry that cannot be used.
        unread: key and reason of each entry that could not be read, for example for want of
            memory or permission. They may be sound, and are never deleted.
        deleted: how many of the damaged ones were deleted.
        errors: which of the damaged ones could not be deleted, and why.
        leftovers: temporary files of killed writers, or of writers at work. No harm; ``gc``
            removes old ones.
    """

    ok: int
    total_bytes: int
    damaged: dict[str, str]
    unread: dict[str, str]
    deleted: int
    errors: tuple[str, ...]
    leftovers: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What ``gc`` did, or with ``dry_run`` would have done.

    Args:
        kept: entries that are referred to.
        kept_young: entries that are not, and were used within the grace period.
        deleted: keys of the entries deleted.
        freed_bytes: sizes of all deleted files.
        leftovers: temporary files deleted.
        errors: what could not be read or deleted, and why. Those files are still there.
        dry_run: nothing was deleted.
    """

    kept: int
    kept_young: int
    deleted: tuple[str, ...]
    freed_bytes: int
    leftovers: tuple[Path, ...]
    errors: tuple[str, ...]
    dry_run: bool


@dataclass(frozen=True, slots=True)
class ShrinkReport:
    """What ``shrink`` did, or with ``dry_run`` would have done.

    Args:
        left_bytes: what the remaining entries take.
        deleted: keys of the entries deleted, least recently used first.
        freed_bytes: what these took.
        dry_run: nothing was deleted.
    """

    left_bytes: int
    deleted: tuple[str, ...]
    freed_bytes: int
    dry_run: bool


def verify(
    store: DirectoryStore,
    progress: Callable[[int, int], None] | None = None,
    *,
    delete_damaged: bool = False,
) -> VerifyReport:
    """Read every entry whole and check it. Safe beside readers and writers; counts as no use.

    Args:
        progress: called with (entries done, entries in all) after each one.
        delete_damaged: delete what is damaged, so that a later ingestion computes it anew. What
            was put anew since it was read stays.
    """
    keys = list(store.keys())
    ok = total_bytes = deleted = 0
    damaged: dict[str, str] = {}
    unread: dict[str, str] = {}
    errors: list[str] = []
    for done, key in enumerate(keys, start=1):
        try:
            used_ns = store.used_ns(key)
            if store.peek(key) is not None and (info := store.describe(key)):
                ok += 1
                total_bytes += info.nbytes
        except (CorruptEntryError, FingerprintMismatchError) as error:
            damaged[key] = str(error)
            if delete_damaged:
                try:  # what is no regular file has no time of use
                    deleted += store.delete(key) if used_ns is None else store.discard(key, used_ns)
                except StoreError as failure:
                    errors.append(str(failure))
        except StoreError as error:
            unread[key] = str(error)
        if progress is not None:
            progress(done, len(keys))
    leftovers = tuple(store.leftovers())
    return VerifyReport(ok, total_bytes, damaged, unread, deleted, tuple(errors), leftovers)


def gc(
    store: DirectoryStore,
    live_handles: Collection[str],
    *,
    grace_s: float = GRACE_S,
    fingerprint: str | None = None,
    dry_run: bool = False,
) -> GcReport:
    """Delete entries that nothing refers to: mark and sweep. Safe beside a running ingestion.

    An entry goes if its handle is not among ``live_handles`` and it was last *used* more than
    ``grace_s`` ago: written, read (known to a minute) or found present by an ingestion. One that
    is used while this runs stays. A time of use in the future, from a clock that is wrong, counts
    as that long ago. What is deleted although someone needs it costs one computation, never an
    answer.

    Args:
        live_handles: ``BlockKV.handle`` of every block still referred to; a set.
        grace_s: seconds; longer than the longest ingestion may take between storing a block and
            referring to it. 0 also takes the temporary files of writers at work, whose ``put``
            then raises StoreError.
        fingerprint: if given, entries of any other model are taken as not referred to, whatever
            their handle. None judges by handle alone.
        dry_run: delete nothing, only tell.

    Raises:
        StoreError: the store cannot be listed.
    """
    kept = kept_young = freed_bytes = 0
    deleted: list[str] = []
    errors: list[str] = []
    for key in list(store.keys()):
        try:
            info = store.describe(key)
            if info is None:
                continue
            if info.handle in live_handles and fingerprint in (None, info.fingerprint):
                kept += 1
            elif info.age_s < grace_s:
                kept_young += 1
            elif dry_run or store.discard(key, info.used_ns):
                deleted.append(key)
                freed_bytes += info.nbytes
        except StoreError as error:
            errors.append(str(error))
    leftovers = dict(_sweep_leftovers(store, grace_s, dry_run, errors))
    freed_bytes += sum(leftovers.values())
    return GcReport(
        kept, kept_young, tuple(deleted), freed_bytes, tuple(leftovers), tuple(errors), dry_run
    )


def _sweep_leftovers(
    store: DirectoryStore, grace_s: float, dry_run: bool, errors: list[str]
) -> Iterator[tuple[Path, int]]:
    """Delete old temporary files: the path and size of each."""
    for path in store.leftovers():
        try:
            status = path.stat()
            if age_s(status.st_mtime_ns) < grace_s:
                continue
            if not dry_run:
                path.unlink()
            yield path, status.st_size
        except FileNotFoundError:  # its writer has finished
            continue
        except OSError as error:
            errors.append(f"cannot delete {path}: {error.strerror or error}")


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
