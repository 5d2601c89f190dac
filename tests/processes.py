"""Run programs in new processes without importing large packages each time. Each process is forked
from a server process that has imported them."""

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
MODULES = [
    "torch", "transformers.models.llama.modeling_llama", "blockattn_rag.lab.training.finetune",
    "blockattn_rag.langchain.chat", "blockattn_rag.llama_index.query_engines", "tests.models",
]  # fmt: skip
PROCESSES.set_forkserver_preload(MODULES)


class Ended(NamedTuple):
    """Exit status and output of a process."""

    status: int
    stdout: str
    stderr: str


def run(
    target: Callable[..., object],
    *arguments: Any,
    folder: Path | str = ".",
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Call a function of a module in a new process, with a working folder and more variables. If a
    signal ended the process, the status is its negative number."""
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
    """Run a file like ``python path arguments...``. ``options``: Options of ``run``."""
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
