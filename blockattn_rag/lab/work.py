"""Work folder of a run (``train`` or ``repair``), from which an interrupted run resumes.

``<output>.work`` contains ``run.json``, which has the settings that affect the result, and all
intermediate results. It exists only during a run and after an interruption.
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
"""Settings by which a ``run.json`` of ``train`` or of ``repair`` is recognized."""


def work_of(output: str | Path) -> Path:
    path = Path(output).resolve()  # Resolve first, because the path "." has an empty name.
    return path.with_name(f"{path.name}.work")


def _interrupted_run(work: Path) -> dict[str, Any] | None:
    """Read the settings of the interrupted run in a work folder. None if there is no such run."""
    if (work / RUN).is_file():
        settings = read_work_file(work / RUN)
        if any(fields <= settings.keys() for fields in _FIELDS):
            return settings
        found = f"its {RUN} has other fields"
    elif not os.path.lexists(work) or (work.is_dir() and {*os.listdir(work)} <= {_LOCK}):
        return None
    else:
        found = f"no {RUN}"
    raise FileExistsError(f"{work} is not a run's work folder ({found}); move or delete it")


def check_resumable(work: Path, settings: Mapping[str, Any]) -> None:
    """Check that no run uses a work folder, and that an interrupted run had the same settings."""
    if (work / _LOCK).is_file():
        with _held(work):
            pass
    _check_same(work, settings)


def _check_same(work: Path, settings: Mapping[str, Any]) -> bool:
    """Whether an interrupted run exists. Raises DataError if it had other settings."""
    before = _interrupted_run(work)
    if before is None:
        return False
    changed = [
        f"{name} ({before.get(name)}, now {settings.get(name)})"
        for name in sorted({*before, *settings})
        if before.get(name) != settings.get(name)
    ]
    if changed:
        raise DataError(
            f"{work} contains an interrupted run with other settings: {', '.join(changed)}. Pass "
            "the same inputs to resume it, or delete that folder to start again"
        )
    return True


@contextmanager
def _held(work: Path) -> Iterator[None]:
    """Lock a work folder, which is created if needed, so that no other process uses it."""
    _interrupted_run(work)
    work.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(work / _LOCK).acquire(blocking=False)
    except Timeout as error:
        raise DataError(
            f"Another run is using {work}: wait until it ends, or choose another output"
        ) from error
    with lock:
        yield


@contextmanager
def work_folder(
    work: Path, settings: Mapping[str, Any], is_worth_keeping: Callable[[BaseException], bool]
) -> Iterator[None]:
    """Lock a run's work folder. If it contains an interrupted run, whose settings must be the same,
    its results are kept for resuming. If the run raises an error, the folder is deleted unless
    ``is_worth_keeping(error)``."""
    # Lock before comparing the settings, so that a running process is reported as such.
    with _held(work):
        if not _check_same(work, settings):
            _clear(work)
            write_json(work / RUN, dict(settings))
        try:
            yield
        except BaseException as error:
            if is_worth_keeping(error):
                logger.warning(
                    "All intermediate results are in %s. Run again with the same inputs to "
                    "resume, or delete the folder to start again.",
                    work,
                )
            else:
                remove_work(work)
            raise


def remove_work(work: Path) -> None:
    """Delete a work folder, settings last, so that it is still recognized after an interruption."""
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
            f"{path} is damaged ({error}); move or delete {path.parent} to start again"
        ) from error


def last_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, and delete newer, incomplete checkpoints. The Trainer
    writes ``trainer_state.json`` last, so a checkpoint is complete if this file is readable."""
    checkpoints = sorted(folder.glob("checkpoint-*"), key=lambda p: -int(p.name.rpartition("-")[2]))
    for path in checkpoints:
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return path
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path)
    return None
