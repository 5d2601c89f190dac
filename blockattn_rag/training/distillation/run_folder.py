"""The work folder of a distillation run: checked before the run, kept until it is complete."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from blockattn_rag.training import work
from blockattn_rag.training.distillation.config import AdaptConfig


@contextmanager
def run_folder(config: AdaptConfig, settings: Mapping[str, Any]) -> Iterator[None]:
    """The work folder while a run lasts: empty at first, unless resuming.

    A run that fails before it has computed anything leaves none.

    Args:
        settings: all that decides the result.

    Raises:
        FileExistsError: there is a result or an interrupted run, and it is to be neither replaced
            nor resumed.
        ValueError: the interrupted run was of other settings, or is damaged; or files that the run
            uses lie in ``output``.
    """
    noted = json.loads(json.dumps(settings, default=str))  # as it is read back
    work.check_run(Path(config.output), config.work, noted, config.resume, config.overwrite)
    files = (
        config.answers_folder,
        *filter(Path.is_file, map(Path, (config.correction, config.merge))),
    )
    work.check_used(Path(config.output), files)
    work.enter_work(config.work, noted, config.resume, config.overwrite)
    try:
        yield
    except BaseException:
        if not any(path.is_file() and path.name != work.RUN for path in config.work.rglob("*")):
            work.remove_work(config.work)
        raise


def replace_output(config: AdaptConfig, result: Path) -> None:
    """Move the finished ``result`` to ``output``; an earlier one is whole until then."""
    output, replaced = Path(config.output), config.work / "replaced"
    if output.exists():
        output.rename(replaced)
    result.rename(output)
    work.remove_work(config.work)
