"""Programs that run in a process of their own, without importing the large packages again.

Each is a fork of a server process that has imported them once.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "torch",
        "transformers.models.llama.modeling_llama",
        "blockattn_rag.lab.training.finetune",
        "blockattn_rag.langchain.chat",
        "blockattn_rag.llama_index.query_engines",
        "tests.models",
    ]
)


class Ended(NamedTuple):
    """How a process ended, and what it wrote."""

    status: int
    stdout: str
    stderr: str


def run(
    target: Callable[..., object],
    *arguments: Any,
    folder: Path | str = ".",
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Call a function of a module in a process, in a folder and with additional variables.

    A signal that ended the process is a negative status.
    """
    with TemporaryDirectory() as outputs:
        files = [str(Path(outputs, name)) for name in ("stdout", "stderr")]
        process = PROCESSES.Process(
            target=_redirected, args=(files, str(folder), environment or {}, target, arguments)
        )
        process.start()
        process.join()
        assert process.exitcode is not None
        return Ended(process.exitcode, *(Path(file).read_text("utf-8") for file in files))


def run_file(path: Path | str, *arguments: str, **options: Any) -> Ended:
    """Run a file as ``python path arguments...``; ``options`` are those of ``run``."""
    return run(_as_main, str(path), arguments, **options)


def _redirected(
    files: list[str],
    folder: str,
    environment: Mapping[str, str],
    target: Callable[..., object],
    arguments: tuple[Any, ...],
) -> None:
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    os.chdir(folder)
    target(*arguments)


def _as_main(path: str, arguments: tuple[str, ...]) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")
