"""The work folder of a run: what is checked before it starts, and what it is resumed from.

``<output>.work`` holds the encoded data, the checkpoints and ``run.json``, the settings that decide
the result. It is there only while a run lasts or was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockattn_rag.files import require_file, write_json
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.model.loading import resolve_name

logger = logging.getLogger("blockattn_rag")

RUN, LOG, CHECKPOINTS = "run.json", "training_log.json", "checkpoints"
"""Settings of a run in its work folder; losses by step in a result; checkpoints of a run."""

_OVERWRITE = "overwrite"  # in RUN, beside the settings


def check_folders(config: FinetuneConfig) -> dict[str, Any]:
    """Check that output and work folder may be written; returns the settings that decide the
    result, with the digests of the data files.

    Raises:
        DataError: a data file is missing.
        FileExistsError, ValueError: see the functions below.
    """
    settings = {
        **config.decisive(),
        "training data": [*map(_digest, config.train_data)],
        "evaluation data": [*map(_digest, config.eval_data)],
    }
    settings = json.loads(json.dumps(settings, default=str))
    check_run(Path(config.output), config.work, settings, config.resume, config.overwrite)
    used = (config.model, resolve_name(config.model), *config.train_data, *config.eval_data)
    check_used(Path(config.output), used)
    return settings


def check_run(
    output: Path, work: Path, settings: Mapping[str, Any], resume: bool, overwrite: bool
) -> None:
    """Check that output and work folder may be written, before anything is computed.

    Args:
        settings: all that decides the result, as they are read back from a JSON file.

    Raises:
        FileExistsError: there is a result or an interrupted run, and it is to be neither replaced
            nor resumed; or something else is there.
        ValueError: the interrupted run was of other settings, or is damaged.
    """
    check_work(work)
    before = {} if overwrite else _interrupted(work, settings, resume)
    check_output(output, overwrite or bool(before.get(_OVERWRITE)))


def check_work(work: Path) -> None:
    """Raises ``FileExistsError`` if there is something at ``work`` that no run left there."""
    if os.path.lexists(work) and not (work / RUN).is_file():
        raise FileExistsError(f"{work} is no work folder of a run (it has no {RUN}); move it away")


def check_output(output: Path, overwrite: bool) -> None:
    """Raises ``FileExistsError`` if there is something at ``output``, unless it is an earlier
    result or an empty folder and is to be overwritten."""
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise FileExistsError(
            f"{output} exists; choose another output, or overwrite it (overwrite=True, --overwrite)"
        )
    empty = output.is_dir() and not any(output.iterdir())
    if output.is_symlink() or not (empty or (output / LOG).is_file()):
        raise FileExistsError(
            f"{output} is no earlier result (a folder with {LOG}), so it is not overwritten; "
            "choose another output"
        )


def check_used(output: Path, used: Iterable[str | Path]) -> None:
    """Raises ``ValueError`` if something that a run reads or keeps lies in its output folder."""
    for path in map(Path, used):
        if path.resolve().is_relative_to(output.resolve()):
            raise ValueError(f"{output} holds {path}, which is used; choose another output")


def _interrupted(work: Path, settings: Mapping[str, Any], resume: bool) -> Mapping[str, Any]:
    """What the interrupted run in ``work`` noted; empty if there is none.

    Raises an error if it is not to be resumed (``FileExistsError``), or cannot be resumed with
    these settings (``ValueError``).
    """
    run = work / RUN
    if not run.is_file():
        return {}
    if not resume:
        raise FileExistsError(
            f"{work} holds an interrupted run; go on with it (resume=True, --resume) or throw it "
            "away (overwrite=True, --overwrite)"
        )
    try:
        before = dict(json.loads(run.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{run} is damaged ({error}), so that the run cannot be resumed; start again "
            "(overwrite=True, --overwrite)"
        ) from error
    if changed := sorted(k for k in settings if settings[k] != before.get(k)):
        raise ValueError(
            f"the interrupted run in {work} had other settings for {', '.join(changed)}; give the "
            "same ones, or start again (overwrite=True, --overwrite)"
        )
    return before


def enter_work(work: Path, settings: Mapping[str, Any], resume: bool, overwrite: bool) -> None:
    """Make the work folder, empty unless resuming, and note in it the settings, and whether an
    earlier result is to be replaced: a resumed run does what was asked of the first."""
    if not resume:
        remove_work(work)
    work.mkdir(parents=True, exist_ok=True)
    if not (work / RUN).is_file():
        write_json(work / RUN, {**settings, _OVERWRITE: overwrite})


def remove_work(work: Path) -> None:
    """Remove the work folder. Its settings go last: what a kill leaves is known by them."""
    for path in work.iterdir() if work.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != RUN:
            path.unlink()
    shutil.rmtree(work, ignore_errors=True)


@contextmanager
def work_folder(config: FinetuneConfig, settings: dict[str, Any]) -> Iterator[None]:
    """The work folder while a run lasts: empty at first, unless resuming.

    A run that fails before its first checkpoint leaves none: there is nothing to resume.
    Only one process of a run may enter: the one that writes.
    """
    enter_work(config.work, settings, config.resume, config.overwrite)
    try:
        yield
    except BaseException:
        if not any((config.work / CHECKPOINTS).glob("checkpoint-*")):
            remove_work(config.work)
        raise


def replace_output(config: FinetuneConfig, result: Path) -> None:
    """Move the finished ``result`` to ``output``; an earlier one is whole until then.

    Every file gets the permissions of the log, which are the process's defaults: safetensors
    writes weights so that only their owner can read them.
    """
    mode = stat.S_IMODE((result / LOG).stat().st_mode)
    for path in result.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    output, replaced = Path(config.output), config.work / "replaced"
    if output.exists():
        output.rename(replaced)
    result.rename(output)
    if config.keep_checkpoints:
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        remove_work(config.work)


def _digest(path: str | Path) -> str:
    """sha256 of a file."""
    require_file(Path(path))
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; half-written ones are removed.

    The Trainer writes ``trainer_state.json`` last, so a checkpoint with a readable one is whole.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda p: -int(p.name.rpartition("-")[2]))
    for path in found:
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
            return path
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path)
    logger.warning("no complete checkpoint in %s: starting from the first step", folder)
    return None
