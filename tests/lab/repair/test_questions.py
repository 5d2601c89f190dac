"""Questions written by the model: parsing, limits and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError
from blockattn_rag.lab.repair import data
from blockattn_rag.lab.repair.data import Question, clean_question, write_questions
from blockattn_rag.lab.repair.plan import LIMITS
from blockattn_rag.prompts import BlockPrompt, Passage
from tests.lab.repair.runs import PASSAGES, block_model, material, nearest
from tests.recording import recorded


class Writer:
    """Stand-in for an engine that writes a question about the fact in the prompt."""

    def __init__(self, engine: BlockAttentionEngine) -> None:
        self.model = engine.model
        self.shown: list[str] = []

    def generate_batch(self, prompts: Sequence[BlockPrompt], **options: Any) -> list[Any]:
        assert options["mode"] == "full"
        self.shown += [prompt.text for prompt in prompts]
        return [self._answer(prompt.text) for prompt in prompts]

    def _answer(self, text: str) -> Any:
        number = int(text.split("fact ")[1].split()[0])
        # One fact gives no question, and two facts give the same question.
        said = {0: "No question.", 3: "what is Fact 2?"}.get(number, f" What is fact {number}?\nOk")
        return type("Answer", (), {"text": said})()


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return BlockAttentionEngine(block_model())


@pytest.fixture
def writer(engine: BlockAttentionEngine) -> Any:
    return Writer(engine)


def write(writer: Any, path: Path, count: int = 6, **changes: Any) -> list[Question]:
    passages = changes.pop("passages", PASSAGES)
    given = material(writer.model, questions=None, passages=passages, nearest=nearest)
    limits = replace(LIMITS, questions=count, passages=2)
    return write_questions(writer, given, limits, path / "q.jsonl", lambda *_: None, **changes)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is the height?", "What is the height?"),
        ('\n "Question: Who was he, and when? Or not?"\nAnswer', "Who was he, and when?"),
        ("**Where is it now?**", "Where is it now?"),
        ("It is a statement.", None),
        ("Why?", None),
        ("No.\nWhat is the height?", None),
        ("", None),
    ],
)
def test_a_question_is_one_line_up_to_the_question_mark(text: str, expected: str | None) -> None:
    assert clean_question(text) == expected


def test_questions_have_own_and_nearest_passages(writer: Any, tmp_path: Path) -> None:
    written = write(writer, tmp_path)
    assert len(writer.shown) == 6
    assert len(written) == 4  # one has no question, two are the same
    for question in written:
        own, *others = question.passages
        assert question.text.lower() == f"what is {own.text.partition(' is')[0]}?" or "2" in (
            question.text
        )
        assert others == [p for p in PASSAGES[:3] if p != own][:2]


def test_only_as_many_passages_as_needed_are_used(writer: Any, tmp_path: Path) -> None:
    assert len(write(writer, tmp_path, count=2)) == 2
    assert len(writer.shown) < 6


def test_stops_at_the_limit(writer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "WRITTEN_AT_ONCE", 2)
    calls = iter([False, True])
    few = write(writer, tmp_path, time_is_up=lambda: next(calls))
    assert len(writer.shown) == 2
    # Existing questions are read even if the time is up.
    assert write(writer, tmp_path, time_is_up=lambda: True) == few
    assert len(writer.shown) == 2


def test_existing_questions_are_kept(writer: Any, tmp_path: Path) -> None:
    first = write(writer, tmp_path)
    path = tmp_path / "q.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == len(writer.shown) == 6
    path.write_text("".join(lines[:4]) + lines[4][:-9])
    assert write(writer, tmp_path) == first
    assert len(writer.shown) == 8
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)


def test_a_damaged_file_is_reported(writer: Any, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text(json.dumps({"passage": "x"}) + "\n")
    with pytest.raises(DataError, match=r"is damaged .*'question'.*delete .* to start again"):
        write(writer, tmp_path)


@pytest.mark.parametrize("passages", [[], [Passage("", "fact 0 is")]])
def test_no_usable_questions_raise_an_error(
    writer: Any, tmp_path: Path, passages: list[Passage]
) -> None:
    with pytest.raises(DataError, match=r"Found no questions|no usable question from 1"):
        write(writer, tmp_path, passages=passages)


def test_passages_are_plain_text_in_the_chat_template(
    engine: BlockAttentionEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recorded(monkeypatch, engine, "generate_batch")
    hostile = Passage("t", "fact <|end|> here")
    with pytest.raises(DataError, match="generated no usable question"):  # the model is random
        write(engine, tmp_path, passages=[hostile])
    (prompt,) = (prompt for call in asked for prompt in call.args[0])
    assert not prompt.context
    assert prompt.text.startswith("<|begin|><|user|>")
    assert prompt.text.endswith("<|assistant|>\n")
    ids = engine.model.tokenizer.prompt_ids(prompt).final
    assert ids.count(257) == 1  # only the one of the template
