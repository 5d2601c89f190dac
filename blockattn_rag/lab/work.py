"""The work folder of a run (``train`` or ``repair``), from which an interrupted run resumes.

``<output>.work`` contains ``run.json``, the settings that affect the result, and everything
computed so far. It exists only during a run and after an interruption.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from blockattn_rag.errors import DataError
from blockattn_rag.files import write_json

logger = logging.getLogger("blockattn_rag")

RUN, CHECKPOINTS = "run.json", "checkpoints"
_LOCK = "lock"
_FIELDS = ({"model", "training data"}, {"model", "passages"})
"""Settings that every ``run.json`` has: of ``train``, and of ``repair``."""


def work_of(output: str | Path) -> Path:
    path = Path(output).resolve()  # The unresolved path "." has an empty name.
    return path.with_name(f"{path.name}.work")


def interrupted_run(work: Path) -> dict[str, Any] | None:
    """Read the settings of the interrupted run in a work folder. None: there is no such run."""
    if not os.path.lexists(work):
        return None
    if (work / RUN).is_file():
        settings = read_work_file(work / RUN)
        if not any(fields <= settings.keys() for fields in _FIELDS):
            raise FileExistsError(
                f"{work} is not the work folder of a run (its {RUN} has other fields); move it away"
            )
        return settings
    if not work.is_dir() or {path.name for path in work.iterdir()} - {_LOCK}:
        raise FileExistsError(f"{work} is not the work folder of a run (no {RUN}); move it away")
    return None


def check_resumable(work: Path, settings: Mapping[str, Any]) -> None:
    """Check that no other run uses a work folder, and that an interrupted run had these
    settings."""
    if (work / _LOCK).is_file():
        with _held(work):
            pass
    _check_same(work, settings)


def _check_same(work: Path, settings: Mapping[str, Any]) -> bool:
    """Whether an interrupted run exists. Raises ``DataError`` if the run had other settings."""
    before = interrupted_run(work)
    if before is None:
        return False
    changed = [
        f"{name} ({before.get(name)}, now {settings.get(name)})"
        for name in sorted({*before, *settings})
        if before.get(name) != settings.get(name)
    ]
    if changed:
        raise DataError(
            f"{work} has an interrupted run with other settings: {', '.join(changed)}. Pass the "
            "same inputs to resume it, or delete that folder to start again"
        )
    return True


@contextmanager
def _held(work: Path) -> Iterator[None]:
    """Lock a work folder against other processes. The folder is created if it does not exist."""
    interrupted_run(work)
    work.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(work / _LOCK).acquire(blocking=False)
    except Timeout as error:
        raise DataError(
            f"Another run is in progress and uses {work}: wait until it ends, or choose another "
            "output"
        ) from error
    with lock:
        yield


@contextmanager
def work_folder(
    work: Path,
    settings: Mapping[str, Any],
    is_worth_keeping: Callable[[BaseException], bool],
) -> Iterator[None]:
    """Context of a run in its work folder, which is locked. An interrupted run is resumed.

    Args:
        settings: JSON values that affect the result.
        is_worth_keeping: Function of an error that returns whether the failed run can be resumed.
            If not, the folder is removed.
    """
    # Lock before comparing the settings, so that a run in progress is reported as such.
    with _held(work):
        if not _check_same(work, settings):
            _clear(work)
            write_json(work / RUN, dict(settings))
        try:
            yield
        except BaseException as error:
            if is_worth_keeping(error):
                logger.warning(
                    "Everything computed so far is in %s, where a run with the same inputs "
                    "resumes. Delete the folder to start again.",
                    work,
                )
            else:
                remove_work(work)
            raise


def remove_work(work: Path) -> None:
    """Delete a work folder, settings last, so that it is recognized after an interruption."""
    _clear(work)
    shutil.rmtree(work, ignore_errors=True)


def _clear(work: Path) -> None:
    for path in work.iterdir() if work.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in (RUN, _LOCK):
            path.unlink()


def read_work_file(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({error}); move {path.parent} away to start again"
        ) from error


def kept_json(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Read the object in a JSON file. A missing file is created first."""
    if not path.is_file():
        write_json(path, make())
    return read_work_file(path)


def last_checkpoint(folder: Path) -> Path | None:
    """Find the newest complete checkpoint in a folder. Incomplete checkpoints are deleted.

    The Trainer writes ``trainer_state.json`` last, so a checkpoint is complete if it is readable.
    """
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda p: -int(p.name.rpartition("-")[2]))
    for path in checkpoints:
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return path
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path)
    return None
