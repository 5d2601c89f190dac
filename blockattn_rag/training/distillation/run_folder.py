"""The work folder of a distillation run: checked before the run, kept until it is complete."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockattn_rag.files.atomic import write_json
from blockattn_rag.training.distillation.config import AdaptConfig
from blockattn_rag.training.work import RUN, check_interrupted, check_output, check_work


def check_run(config: AdaptConfig, settings: Mapping[str, Any]) -> None:
    """Check that output and work folder may be written, before anything is computed.

    Args:
        settings: all that decides the result.

    Raises:
        FileExistsError: there is a result or an interrupted run, and it is to be neither replaced
            nor resumed.
        ValueError: the interrupted run was of other settings, or is damaged.
    """
    check_output(Path(config.output), config.overwrite)
    check_work(config.work)
    check_interrupted(
        config.work, _plain(settings), resume=config.resume, overwrite=config.overwrite
    )


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """As they are read back from a file."""
    return dict(json.loads(json.dumps(settings, default=str)))


@contextmanager
def run_folder(config: AdaptConfig, settings: Mapping[str, Any]) -> Iterator[None]:
    """The work folder while a run lasts: empty at first, unless resuming.

    A run that fails before it has computed anything leaves none.
    """
    if not config.resume:
        shutil.rmtree(config.work, ignore_errors=True)
    config.work.mkdir(parents=True, exist_ok=True)
    write_json(config.work / RUN, _plain(settings))
    try:
        yield
    except BaseException:
        if not any(path.is_file() and path.name != RUN for path in config.work.rglob("*")):
            shutil.rmtree(config.work, ignore_errors=True)
        raise


def replace_output(config: AdaptConfig, result: Path) -> None:
    """Move the finished ``result`` to ``output``; an earlier one is whole until then."""
    output, replaced = Path(config.output), config.work / "replaced"
    if output.exists():
        output.rename(replaced)
    result.rename(output)
    shutil.rmtree(config.work, ignore_errors=True)
