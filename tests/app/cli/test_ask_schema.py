"""``ask --schema``: JSON that fits the schema, whole or an error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from blockattn_rag.app.cli.ask import talk
from blockattn_rag.app.rag.ask import Assistant
from blockattn_rag.app.rag.database import MANIFEST, Database
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.model import BlockModel
from blockattn_rag.server.protocol import COMPLETIONS
from tests.app.cli.conftest import Command
from tests.server.client.fake_server import FakeServer

QUESTION = "How high is Halden Tower?"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "höhe": {"type": "integer", "minimum": 100, "maximum": 999, "title": "{metres}"},
        "kind": {"enum": ["tower", "lake"]},
    },
    "required": ["höhe", "kind"],
}

Write = Callable[..., Path]


@pytest.fixture
def schema(tmp_path: Path) -> Write:
    """Writes a file of a schema: bytes as they are, all else as JSON."""

    def write(given: Any = SCHEMA) -> Path:
        file = tmp_path / "schema.json"
        file.write_bytes(given if isinstance(given, bytes) else json.dumps(given).encode())
        return file

    return write


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The final blocks that the model is asked."""
    texts: list[str] = []
    original = BlockAttentionLLM.to_prompt

    def noted(self: BlockAttentionLLM, *given: Any, **options: Any) -> Any:
        prompt = original(self, *given, **options)
        texts.append(prompt.final)
        return prompt

    monkeypatch.setattr(BlockAttentionLLM, "to_prompt", noted)
    return texts


def test_an_answer_is_an_object_that_fits_and_passages_are_reused(
    cli: Command, filled: Path, schema: Write, seen: list[str]
) -> None:
    command = ("ask", QUESTION, "--db", filled, "--schema", schema())
    found = cli(*command, "--json")
    assert found.status == 0, found.stderr
    validate(found.json["object"], SCHEMA)
    assert json.loads(found.json["answer"]) == found.json["object"]
    assert (found.json["hits"], found.json["misses"]) == (2, 0)
    assert QUESTION in seen[-1]
    assert json.dumps(SCHEMA, ensure_ascii=False) in seen[-1]
    shown = cli(*command).stdout.splitlines()
    assert json.loads(shown[0]) == found.json["object"]
    assert shown[2].startswith("[1] ")


def test_without_a_schema_there_is_no_object(cli: Command, filled: Path) -> None:
    found = cli("ask", QUESTION, "--db", filled, "--max-new-tokens", 2, "--json").json
    assert found["object"] is None


def test_an_answer_that_is_cut_is_an_error_and_not_half_an_object(
    cli: Command, filled: Path, schema: Write
) -> None:
    command = ("ask", QUESTION, "--db", filled, "--schema", schema(), "--max-new-tokens", 9)
    for asked in (command, (*command, "--json")):
        output = cli(*asked)
        assert (output.status, output.stdout) == (1, "")
        assert "a JSON answer was cut off at its token limit; raise" in output.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"{", "invalid JSON: Expecting property name"),
        (b"\xff\xfe\xff", "invalid JSON: "),
        ([1], 'expected an object such as {"type": "object", '),
        (True, "found true"),
    ],
)
def test_a_file_that_holds_no_schema_is_refused_before_a_model_is_loaded(
    cli: Command, filled: Path, schema: Write, given: Any, message: str
) -> None:
    output = cli("ask", QUESTION, "--db", filled / "none", "--schema", schema(given))
    shown = "".join(output.stderr.replace("│", " ").split())
    assert (output.status, output.stdout) == (2, "")
    assert "--schema" in shown
    assert message.replace(" ", "") in shown


def test_a_file_must_be_there(cli: Command, filled: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere.json", tmp_path):
        output = cli("ask", QUESTION, "--db", filled, "--schema", path)
        assert output.status == 2
        assert "Invalid value for '--schema'" in output.stderr


def test_a_schema_that_cannot_be_compiled_is_refused_by_name(
    cli: Command, filled: Path, schema: Write
) -> None:
    file = schema({"title": "Names", "type": "array", "uniqueItems": True})
    output = cli("ask", QUESTION, "--db", filled, "--schema", file, "--json")
    assert (output.status, output.stdout) == (1, "")
    assert "error: the JSON schema 'Names' cannot be compiled: " in output.stderr
    assert "uniqueItems" in output.stderr


def test_each_line_of_a_pipe_has_its_object(cli: Command, filled: Path, schema: Write) -> None:
    output = cli(
        "ask", "--db", filled, "--schema", schema(), "--json", given=f"{QUESTION}\nWhat is it?\n"
    )
    found = [json.loads(line) for line in output.stdout.splitlines()]
    assert [one["question"] for one in found] == [QUESTION, "What is it?"]
    for one in found:
        validate(one["object"], SCHEMA)


def test_in_a_conversation_every_answer_fits(
    filled: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seen: list[str],
) -> None:
    lines = iter([QUESTION, "And now?", "/quit"])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    talk(Assistant(Database.open(filled), schema=SCHEMA), mode="block")
    out, _ = capsys.readouterr()
    answers = [line for line in out.splitlines() if line.startswith("{")]
    assert len(answers) == 2
    for answer in answers:
        validate(json.loads(answer), SCHEMA)
    assert f"Q: {QUESTION}\nA: {answers[0]}" in seen[-1]


def test_a_server_is_asked_for_it(
    cli: Command, database: Path, model: Path, schema: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    command = ("ask", QUESTION, "--db", database, "--schema", schema(), "--json")
    expected = cli(*command).json["object"]
    server = FakeServer(BlockModel.from_pretrained(model, device="cpu"))
    manifest = database / MANIFEST
    with server.listening():
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "server": server.url}))
        found = cli(*command)
    assert found.status == 0, found.stderr
    assert found.json["object"] == expected
    [body] = server.bodies(COMPLETIONS)
    assert body["structured_outputs"] == {"json": SCHEMA}
