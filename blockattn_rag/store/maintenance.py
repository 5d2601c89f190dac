"""Looking after a store on disk: finding damaged entries, and collecting what nothing refers to."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blockattn_rag.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from blockattn_rag.store.directory import DirectoryStore, EntryInfo

GRACE_S = 3600.0
"""How long ``gc`` leaves new entries alone: an ingestion stores KV first, refers to it later."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What ``verify`` found.

    Args:
        ok: undamaged entries.
        total_bytes: their files' sizes.
        damaged: key and reason of each entry that cannot be used.
        deleted: how many of these were deleted.
        leftovers: temporary files of killed writers, or of writers at work. No harm; ``gc``
            removes old ones.
    """

    ok: int
    total_bytes: int
    damaged: dict[str, str]
    deleted: int
    leftovers: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What ``gc`` did, or with ``dry_run`` would have done.

    Args:
        kept: entries that are referred to.
        kept_young: entries that are not, and are younger than the grace period.
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


def verify(
    store: DirectoryStore,
    progress: Callable[[int, int], None] | None = None,
    *,
    delete_damaged: bool = False,
) -> VerifyReport:
    """Read every entry whole and check it. Safe beside readers and writers.

    Args:
        progress: called with (entries done, entries in all) after each one.
        delete_damaged: delete what is damaged, so that a later ingestion computes it anew.
    """
    keys = list(store.keys())
    ok = total_bytes = deleted = 0
    damaged: dict[str, str] = {}
    for done, key in enumerate(keys, start=1):
        try:
            if store.get(key) is not None and (info := store.describe(key)):
                ok += 1
                total_bytes += info.nbytes
        except StoreError as error:
            damaged[key] = str(error)
            deleted += delete_damaged and store.delete(key)
        if progress is not None:
            progress(done, len(keys))
    return VerifyReport(ok, total_bytes, damaged, deleted, tuple(store.leftovers()))


def gc(
    store: DirectoryStore,
    live_handles: Collection[str],
    *,
    grace_s: float = GRACE_S,
    fingerprint: str | None = None,
    dry_run: bool = False,
) -> GcReport:
    """Delete entries that nothing refers to: mark and sweep. Safe beside a running ingestion.

    The mark is ``live_handles``. An entry outside it goes once it was *written* more than
    ``grace_s`` ago (the time of the last read is not kept reliably by file systems). What is
    deleted although someone needs it costs one computation, never an answer.

    Args:
        live_handles: ``BlockKV.handle`` of every block still referred to; a set.
        grace_s: seconds; longer than the longest ingestion may take between storing a block and
            referring to it. 0 also takes the temporary files of writers at work, whose ``put``
            then raises StoreError.
        fingerprint: if given, entries of any other model are taken as not referred to, whatever
            their handle. None judges by handle alone.
        dry_run: delete nothing, only tell.
    """
    kept = kept_young = freed_bytes = 0
    deleted: list[str] = []
    errors: list[str] = []
    for key in list(store.keys()):
        try:
            info = store.describe(key)
            if info is None:
                continue
            if _is_live(info, live_handles, fingerprint):
                kept += 1
            elif info.age_s < grace_s:
                kept_young += 1
            elif dry_run or store.delete(key):
                deleted.append(key)
                freed_bytes += info.nbytes
        except StoreError as error:
            errors.append(str(error))
    leftovers, leftover_bytes = _sweep_leftovers(store, grace_s, dry_run, errors)
    return GcReport(
        kept=kept,
        kept_young=kept_young,
        deleted=tuple(deleted),
        freed_bytes=freed_bytes + leftover_bytes,
        leftovers=tuple(leftovers),
        errors=tuple(errors),
        dry_run=dry_run,
    )


def _is_live(info: EntryInfo, live_handles: Collection[str], fingerprint: str | None) -> bool:
    return info.handle in live_handles and fingerprint in (None, info.fingerprint)


def _sweep_leftovers(
    store: DirectoryStore, grace_s: float, dry_run: bool, errors: list[str]
) -> tuple[list[Path], int]:
    swept: list[Path] = []
    nbytes = 0
    for path in store.leftovers():
        try:
            status = path.stat()
            if time.time() - status.st_mtime < grace_s:
                continue
            if not dry_run:
                path.unlink()
            swept.append(path)
            nbytes += status.st_size
        except FileNotFoundError:  # its writer has finished
            continue
        except OSError as error:
            errors.append(f"cannot delete {path}: {error.strerror or error}")
    return swept, nbytes
