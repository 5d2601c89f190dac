"""The work folder of a run: what is checked before it starts, and what it is resumed from.

``<output>.work`` holds the encoded data, the checkpoints and ``run.json``, the settings that decide
the result. It is there only while a run lasts or was interrupted.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockattn_rag.errors import DataError
from blockattn_rag.training.config import FinetuneConfig

logger = logging.getLogger("blockattn_rag")

RUN = "run.json"


def check_folders(config: FinetuneConfig) -> dict[str, Any]:
    """See that there is a place to write to; returns the settings that decide the result."""
    output, run = Path(config.output), config.work / RUN
    settings = {**config.decisive(), "data": _data_digests(config)}
    settings = json.loads(json.dumps(settings, default=str))
    if config.overwrite:
        return settings
    if output.exists():
        raise FileExistsError(f"{output} exists; choose another output or pass overwrite=True")
    if not run.is_file():
        return settings
    if not config.resume:
        raise FileExistsError(
            f"{config.work} holds an interrupted run; pass resume=True to go on with it or "
            "overwrite=True to throw it away"
        )
    before = json.loads(run.read_text(encoding="utf-8"))
    if changed := sorted(k for k in settings if settings[k] != before.get(k)):
        raise ValueError(
            f"the interrupted run in {config.work} had other settings for {', '.join(changed)}; "
            "give the same ones, or pass overwrite=True to start again"
        )
    return settings


@contextmanager
def fresh_work_folder(config: FinetuneConfig, main: bool) -> Iterator[None]:
    """Start from an empty work folder unless resuming; leave none behind if the data are bad.

    ``main``: this is the one process that writes.
    """
    if not main:
        yield
        return
    if not config.resume:
        shutil.rmtree(config.work, ignore_errors=True)
    config.work.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except DataError:
        if not (config.work / RUN).is_file():
            shutil.rmtree(config.work)
        raise


def _data_digests(config: FinetuneConfig) -> list[str]:
    """sha256 of each training file."""
    digests = []
    for path in config.train_data:
        if not Path(path).is_file():
            raise DataError(f"found no file {path}; expected a file of JSON lines")
        with Path(path).open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    return digests


def last_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint; half-written ones are removed.

    The Trainer writes ``trainer_state.json`` last, so a checkpoint with a readable one is whole.
    """
    found = sorted(folder.glob("checkpoint-*"), key=lambda p: -int(p.name.rpartition("-")[2]))
    for path in found:
        try:
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path)
            continue
        return path
    logger.warning("no complete checkpoint in %s: starting from the first step", folder)
    return None
