from __future__ import annotations

import itertools
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockattn_rag import Recipe
from blockattn_rag.app.serving import settings_of
from blockattn_rag.model import BlockModel
from blockattn_rag.server.protocol import OPENAI
from tests.app.cli.conftest import Command, change_manifest
from tests.fake_server import FakeServer
from tests.holding import LONGEST_S
from tests.server.fake_vllm import FakeVllm, fake_vllm


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    fake = fake_vllm(tmp_path)
    monkeypatch.syspath_prepend(fake.folder)
    for name in ("PYTHONPATH", "FAKE_TOLD"):
        monkeypatch.setenv(name, fake.environment[name])
    return fake


@pytest.fixture
def server(
    loaded: BlockModel, model: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeServer]:
    """The server that the stand-in forwards requests to."""
    fake = FakeServer(loaded, name=str(model), api_key="the-secret")
    with fake.listening():
        monkeypatch.setenv("FAKE_UPSTREAM", fake.url.rpartition(":")[2])
        monkeypatch.setenv("VLLM_API_KEY", "the-secret")
        yield fake


@pytest.mark.parametrize(
    ("launcher", "number", "status"), [([], signal.SIGINT, 130), (["nohup"], signal.SIGTERM, 0)]
)
def test_a_served_model_is_checked_and_stopped_by_a_signal(
    server: FakeServer, vllm: FakeVllm, loaded: BlockModel, model: Path, port: int, tmp_path: Path,
    launcher: list[str], number: int, status: int,
) -> None:  # fmt: skip
    serve = [sys.executable, "-m", "blockattn_rag", "serve", str(model), "--store", "kv"]
    options = ["--port", str(port), "--", "--max-model-len", "64"]
    process = subprocess.Popen(
        [*launcher, *serve, *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        address, curl = process.stdout.readline(), process.stdout.readline()
        # Child processes inherit whether SIGHUP is ignored.
        is_immune = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert _ignores_hangup(process.pid) == (is_immune or launcher == ["nohup"])
        process.send_signal(number)
        _, errors = process.communicate(timeout=LONGEST_S)
    finally:
        process.kill()
    assert process.returncode == status, errors
    assert address == f"{model} is served at http://127.0.0.1:{port}\n"
    assert curl.startswith(f'curl http://127.0.0.1:{port}{OPENAI}/chat/completions -H "Auth')
    assert "the log of the fake" in errors
    assert "The server works correctly" in errors
    assert "the-secret" not in errors + address + curl
    told = vllm.told()
    assert dict(itertools.pairwise(told["options"]))["--allowed-origins"] == "[]"
    assert told["options"][-2:] == ["--max-model-len", "64"]
    assert told["environment"]["VLLM_PLUGINS"] == "blockattn"
    vllm.assert_ended()


def _ignores_hangup(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text("utf-8")
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(mask, 16) >> (signal.SIGHUP - 1) & 1)


def test_a_server_with_wrong_answers_is_stopped(
    cli: Command, server: FakeServer, vllm: FakeVllm, loaded: BlockModel, model: Path, port: int,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    server.report = {"misses": 1}
    output = cli("serve", model, "--store", tmp_path / "kv", "--port", port, status=1)
    assert "NO" in output.stderr
    assert "The server did not pass its checks; it will be stopped" in output.stderr
    vllm.assert_ended()


def test_a_database_is_served_with_its_settings(
    cli: Command, vllm: FakeVllm, database: Path, port: int, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    manifest = database / "blockattn.json"
    fields = json.loads(manifest.read_text())
    change_manifest(database, namespace="team", kv_dtype="int8", store=str(tmp_path / "kv"))
    Recipe("head:2").save(database / "recipe")
    output = cli(
        "serve", "--db", database, "--port", port, "--sources", "--", "--die", "now", status=1
    )
    assert "vLLM exited with status 3 before it was ready: ServingError: the cause" in output.stderr
    options = vllm.told()["options"]
    found = dict(itertools.pairwise(options))
    extra = "--kv-transfer-config.kv_connector_extra_config"
    assert found["--model"] == fields["model"]
    for name, value in (
        ("store", str(tmp_path / "kv")), ("recipe", "head:2"), ("namespace", "team"),
        ("kv_dtype", "int8"), ("recognize", "sources"),
    ):  # fmt: skip
        assert json.loads(found[f"{extra}.{name}"]) == value
    manifest.write_text(json.dumps(fields))
    assert settings_of(database).store == str(database / "kv")


PASSWORD = "must not contain a user, password, query or fragment"


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("", 2, "Expected a MODEL and a --store, or a database (--db)"),
        ("bundled --store memory:", 2, "An in-memory store is lost"),
        ("--db {database} --dtype float32", 2, "A database already has a model, store"),
        ("--db nowhere", 1, "nowhere is not a database"),
        ("bundled --store kv -- --port 1", 1, "pass --port before --"),
        ("bundled --store kv --port {taken}", 1, "in use; choose another"),
        ("bundled --store redis://:hunter2@127.0.0.1 --port {port}", 1, PASSWORD),
        ("bundled --store s3://me:hunter2@kv --port {port}", 1, PASSWORD),
        ("bundled --store s3://kv?key=hunter2 --port {port}", 1, PASSWORD),
        ("bundled --store kv -- --api-ke hunter2", 1, "VLLM_API_KEY"),
    ],
)
def test_wrong_arguments_are_refused_before_vllm_starts(
    cli: Command, vllm: FakeVllm, filled: Path, port: int, command: str, status: int, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = command.format(database=filled, port=port, taken=taken.getsockname()[1]).split()
        output = cli("serve", *words, status=status)
    assert message in output.message
    assert "hunter2" not in output.stdout + output.stderr
    assert not (vllm.folder / "told.json").exists()


def test_a_database_ingested_through_a_server_is_refused(
    cli: Command, vllm: FakeVllm, database: Path
) -> None:
    change_manifest(database, server="http://gpu")
    output = cli("serve", "--db", database, status=1)
    assert "uses the server http://gpu" in output.stderr


def test_reports_missing_vllm(cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    output = cli("serve", "bundled", "--store", "kv", status=1)
    [line] = output.stderr.splitlines()
    assert "needs vLLM, which is not installed: create a separate environment" in line
    guide = (Path(__file__).parents[3] / "docs/guides/serving_vllm.md").read_text(encoding="utf-8")
    commands = re.findall(r"`(pip install [^`]+)`", line)
    assert len(commands) == 3
    assert all(command in guide for command in commands)
