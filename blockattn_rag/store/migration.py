"""From a store of format version 1 to one of today: in place, without a model, resumable.

Entry by entry, the new one is made durable before the old one is deleted, so that a process that
dies at any moment loses nothing: run it again. Until all are done the folder says that it is of
version 1, and no engine opens it.

Version 1 does not tell a block that was encoded alone from one that was encoded after a sink or
corrected, and a plain key must never lead to another block than a plain one. So whoever migrates
says that there are none, or gives the entries up, which costs computing them anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blockattn_rag.errors import CorruptEntryError, StoreError
from blockattn_rag.files.atomic import replacing, sync
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.store import files, version_1
from blockattn_rag.store.directory import (
    MARK,
    MARKED,
    OBJECTS,
    entry_files,
    read_mark,
)
from blockattn_rag.store.format import decode, encode
from blockattn_rag.store.header import FormatError

# What two batches of 16 bits may make of the same tokens, and far less than a sink changes.
_SAME = 0.05


@dataclass(frozen=True, slots=True)
class MigrateReport:
    """What ``migrate`` did, or with ``dry_run`` would have done.

    Args:
        migrated: entries of version 1 that are entries of today now.
        same: further ones of the same tokens, which are one entry now.
        dropped: entries that were given up, because they may have been encoded after a sink.
        damaged: path and reason of entries that could not be used and were deleted.
        errors: what could not be read or written, and why. These files are still there, and the
            store is still of version 1: run it again.
        dry_run: nothing was written or deleted.
    """

    migrated: int = 0
    same: int = 0
    dropped: int = 0
    damaged: tuple[tuple[str, str], ...] = ()
    errors: tuple[str, ...] = ()
    dry_run: bool = False


def migrate(
    folder: str | Path,
    *,
    all_plain: bool,
    dry_run: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> MigrateReport:
    """Turn a directory store of version 1 into one of today. No engine may use it meanwhile.

    Args:
        all_plain: no entry was encoded after a sink or corrected, which the entries do not tell.
            False: they may have been, and are all deleted.
        dry_run: read and check all entries, write and delete nothing.
        progress: called with (folders done, folders in all).

    Raises:
        StoreError: the folder is no store, or holds entries that contradict ``all_plain``.
    """
    folder = Path(folder)
    mark = read_mark(folder / MARK)
    if mark not in (MARKED, {**MARKED, "version": 1}):
        raise StoreError(f"{folder} is no store of version 1: its {MARK} says {mark}")
    work = _Migration(folder / OBJECTS, all_plain, is_old=mark != MARKED, dry_run=dry_run)
    shards = files.names_in(folder / OBJECTS)
    for done, shard in enumerate(shards, start=1):
        for file in entry_files(folder / OBJECTS / shard):
            work.take(file.path)
        if progress is not None:
            progress(done, len(shards))
    if not work.report.errors and not dry_run:
        with files.explained("write", folder / MARK):
            _write(folder / MARK, [json.dumps(MARKED).encode() + b"\n"])
    return work.report


class _Migration:
    """One run of ``migrate``. ``is_old``: the store says that it is of version 1, so that what it
    holds of today's comes from an earlier run."""

    def __init__(self, objects: Path, all_plain: bool, *, is_old: bool, dry_run: bool) -> None:
        self.report = MigrateReport(dry_run=dry_run)
        self._objects = objects
        self._all_plain = all_plain
        self._is_old = is_old

    def take(self, path: Path) -> None:
        """Turn a file into an entry of today, or give it up. What is of today stays."""
        report = self.report
        try:
            found = self._read(path)
        except CorruptEntryError as error:
            self._remove(path)
            self.report = replace(report, damaged=(*report.damaged, (str(path), str(error))))
            return
        except StoreError as error:
            self.report = replace(report, errors=(*report.errors, str(error)))
            return
        if found == "of today":
            return
        if isinstance(found, str):
            self.report = replace(report, dropped=report.dropped + 1)
        elif self._put(path, *found):
            self.report = replace(report, migrated=report.migrated + 1)
        else:
            self.report = replace(report, same=report.same + 1)
        self._remove(path)

    def _read(self, path: Path) -> tuple[BlockKV, int] | str:
        """The block of an entry of version 1, and its time of use; or why it is not read."""
        with files.opened(path) as file:
            if file is None:
                return "of today"  # another run has just replaced it
            is_old = version_1.is_version_1(file.read(version_1.HEAD_BYTES) or b"")
            if not self._all_plain and (is_old or self._is_old):
                return "in doubt"
            if not is_old:
                return "of today"
            file.seek(0)
            key, kv = version_1.decode(files.read_whole(file))
            if key != path.stem:
                raise FormatError(f"it is the entry of another key, {key}")
            return kv, os.fstat(file.fileno()).st_mtime_ns

    def _put(self, path: Path, kv: BlockKV, used_ns: int) -> bool:
        """Store a block as an entry of today that was last used then; False if it is there."""
        target = self._objects / kv.key[:2] / f"{kv.key}{path.suffix}"
        existing = None
        with suppress(CorruptEntryError), files.opened(target) as file:
            existing = None if file is None else decode(files.read_whole(file))
        if existing is not None:
            _check_same(path, kv, existing)
        elif not self.report.dry_run:
            with files.explained("write", target):
                if not target.parent.exists():
                    files.make_folder(target.parent)
                    sync(self._objects)
                _write(target, encode(kv), used_ns)
        return existing is None

    def _remove(self, path: Path) -> None:
        if not self.report.dry_run:
            with files.explained("delete", path):
                path.unlink(missing_ok=True)


def _write(path: Path, buffers: list[Any], used_ns: int | None = None) -> None:
    with replacing(path, mode=files.FILE_MODE) as file:
        file.writelines(buffers)
        file.flush()
        if used_ns is not None:
            os.utime(file.fileno(), ns=(used_ns, used_ns))


def _check_same(path: Path, kv: BlockKV, existing: BlockKV) -> None:
    """Refuse what contradicts that all entries were encoded alone: other KV of the same tokens."""
    for layer in range(kv.num_layers):
        pairs = zip(kv.states(layer), existing.states(layer), strict=True)
        if any(relative_error(a.float(), b.float()) > _SAME for a, b in pairs):
            raise StoreError(
                f"{path} and another entry hold different keys and values of the same tokens "
                f"({kv.token_ids.tolist()[:8]} ...), so one of them was encoded after a sink or "
                "corrected; nothing tells which, and others may have been too. Give them all up: "
                "`blockattn-rag store migrate --drop`"
            )
