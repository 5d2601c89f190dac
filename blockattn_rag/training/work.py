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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockattn_rag.files.atomic import write_json
from blockattn_rag.files.jsonl import require_file
from blockattn_rag.model.loading import resolve_name
from blockattn_rag.training.config import FinetuneConfig

logger = logging.getLogger("blockattn_rag")

RUN, LOG, CHECKPOINTS = "run.json", "training_log.json", "checkpoints"
"""Settings of a run in its work folder; losses by step in a result; checkpoints of a run."""


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
    check_output(Path(config.output), config.overwrite)
    _check_read(config)
    check_work(config.work)
    check_interrupted(config.work, settings, resume=config.resume, overwrite=config.overwrite)
    return settings


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


def _check_read(config: FinetuneConfig) -> None:
    """Raises ``ValueError`` if the model or data lie in the output folder."""
    output = Path(config.output)
    for used in map(
        Path, (config.model, resolve_name(config.model), *config.train_data, *config.eval_data)
    ):
        if used.resolve().is_relative_to(output.resolve()):
            raise ValueError(f"{output} holds {used}, which is read; choose another output")


def check_work(work: Path) -> None:
    """Raises ``FileExistsError`` if ``work`` exists and is not the work folder of a run."""
    if os.path.lexists(work) and not (work / RUN).is_file():
        raise FileExistsError(f"{work} is no work folder of a run (it has no {RUN}); move it away")


def check_interrupted(
    work: Path, settings: Mapping[str, Any], *, resume: bool, overwrite: bool
) -> None:
    """Raises an error if there is an interrupted run in ``work`` that is neither to be resumed nor
    overwritten (``FileExistsError``), or cannot be resumed with these settings (``ValueError``).

    ``settings``: all that decides the result, as they are read back from a JSON file.
    """
    run = work / RUN
    if overwrite or not run.is_file():
        return
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


@contextmanager
def work_folder(config: FinetuneConfig, settings: dict[str, Any]) -> Iterator[None]:
    """The work folder while a run lasts: empty at first, unless resuming.

    A run that fails before its first checkpoint leaves none: there is nothing to resume.
    Only one process of a run may enter: the one that writes.
    """
    if not config.resume:
        shutil.rmtree(config.work, ignore_errors=True)
    config.work.mkdir(parents=True, exist_ok=True)
    write_json(config.work / RUN, settings)
    try:
        yield
    except BaseException:
        if not any((config.work / CHECKPOINTS).glob("checkpoint-*")):
            shutil.rmtree(config.work, ignore_errors=True)
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
    shutil.rmtree(replaced if config.keep_checkpoints else config.work, ignore_errors=True)


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
