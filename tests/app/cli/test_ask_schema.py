"""``ask --schema`` prints complete JSON that follows the schema, or fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import validate

from blockattn_rag.app.cli.ask import talk
from blockattn_rag.app.rag.ask import Assistant
from blockattn_rag.app.rag.database import Database
from blockattn_rag.llama_index import BlockAttentionLLM
from tests.app.cli.conftest import Command

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
    """Function that writes a schema file: bytes unchanged, everything else as JSON."""

    def write(given: Any = SCHEMA) -> Path:
        file = tmp_path / "schema.json"
        file.write_bytes(given if isinstance(given, bytes) else json.dumps(given).encode())
        return file

    return write


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Final blocks of all prompts."""
    texts: list[str] = []
    original = BlockAttentionLLM.to_prompt

    def noted(self: BlockAttentionLLM, *given: Any, **options: Any) -> Any:
        prompt = original(self, *given, **options)
        texts.append(prompt.final)
        return prompt

    monkeypatch.setattr(BlockAttentionLLM, "to_prompt", noted)
    return texts


def test_answer_fits_schema(cli: Command, filled: Path, schema: Write, seen: list[str]) -> None:
    command = ("ask", QUESTION, "--db", filled, "--schema", schema())
    found = cli(*command, "--json")
    validate(found.json["object"], SCHEMA)
    assert json.loads(found.json["answer"]) == found.json["object"]
    assert (found.json["hits"], found.json["misses"]) == (2, 0)
    assert QUESTION in seen[-1]
    assert json.dumps(SCHEMA, ensure_ascii=False) in seen[-1]
    shown = cli(*command).stdout.splitlines()
    assert json.loads(shown[0]) == found.json["object"]
    assert shown[2].startswith("[1] ")


def test_every_answer_of_a_conversation_fits_the_schema(
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
