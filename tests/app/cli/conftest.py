"""Fixtures: a tiny model on disk, a folder of documents, and a function that runs commands."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from blockattn_rag.app.cli.app import app
from blockattn_rag.app.rag.database import MANIFEST
from blockattn_rag.model import BlockModel
from tests.fake_server import FakeServer
from tests.models import tiny_model, tiny_tokenizer
from tests.store.conftest import s3 as s3
from tests.store.conftest import s3_url as s3_url


@dataclass(frozen=True)
class Output:
    """Output of a command."""

    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        return json.loads(self.stdout)

    @property
    def message(self) -> str:
        """``stderr`` in one line, without the frame around usage errors."""
        return " ".join(self.stderr.replace("│", " ").split())


Command = Callable[..., Output]


def change_manifest(database: Path, **changes: Any) -> None:
    path = database / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="session")
def cli() -> Command:
    """Function that runs a command in this process, and checks its exit status. ``given``: Standard
    input. ``status``: Expected exit status."""

    def run(*arguments: object, given: str | None = None, status: int = 0) -> Output:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
        assert result.exit_code == status, result.stderr
        return Output(result.stdout, result.stderr)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a byte tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def loaded(model: Path) -> BlockModel:
    """The loaded model from the folder ``model``."""
    return BlockModel.from_pretrained(model, device="cpu")


@pytest.fixture
def server(loaded: BlockModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server that requires an API key, which is set in the environment."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("BLOCKATTN_RAG_API_KEY", "the-secret")
    with FakeServer(loaded, api_key="the-secret").listening() as server:
        yield server


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    """A folder with two text files, a binary file and a hidden file."""
    folder = tmp_path / "documents"
    (folder / "more").mkdir(parents=True)
    (folder / "tower.txt").write_text("Halden Tower is 214 metres high.\n", encoding="utf-8")
    (folder / "more" / "river.md").write_text(
        "# Rivers\n\nThe Ossa River is long.\n", encoding="utf-8"
    )
    (folder / "picture.raw").write_bytes(b"\x00\x01\x02")
    (folder / ".hidden.txt").write_text("not to be read", encoding="utf-8")
    return folder


@pytest.fixture
def ingest(cli: Command, model: Path, documents: Path, tmp_path: Path) -> Command:
    """Function that ingests ``documents`` into ``tmp_path / "db"`` with ``model``."""
    return partial(cli, "ingest", documents, "--db", tmp_path / "db", "--model", model)


@pytest.fixture(scope="session")
def filled(cli: Command, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with one passage, shared by all tests. Tests that write use ``database``."""
    folder = tmp_path_factory.mktemp("filled")
    text = folder / "tower.txt"
    text.write_text("Halden Tower is 214 metres high.\n", encoding="utf-8")
    cli("ingest", text, "--db", folder / "db", "--model", model)
    return folder / "db"


@pytest.fixture
def database(filled: Path, tmp_path: Path) -> Path:
    """A copy of ``filled`` that the test may change."""
    copy = tmp_path / "db"
    shutil.copytree(filled, copy)
    return copy
