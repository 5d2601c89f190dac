from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.lab.repair.files import read_passages, read_questions
from blockattn_rag.prompts.formats import Passage

ONE, TWO = Passage("one", "the first"), Passage("", "the second")


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def nearest(text: str, count: int) -> Sequence[Passage]:
    return [TWO, ONE][:count]


def test_passages_are_read_once_each(tmp_path: Path) -> None:
    lines = {"title": "one", "text": " the first\n"}, {"text": "the second", "id": 3}
    assert read_passages(write(tmp_path / "p.jsonl", *lines, lines[0])) == [ONE, TWO]


def test_questions_bring_their_passages_gold_ones_first_or_get_the_nearest(tmp_path: Path) -> None:
    own = {
        "question": "which?",
        "answers": ["x", "y"],
        "passages": [{"title": "one", "text": "the first"}, {"text": "the second", "gold": True}],
    }
    first, second = read_questions(write(tmp_path / "q", own, {"question": "why?"}), nearest, 1)
    assert (first.text, first.passages, first.answers) == ("which?", (TWO, ONE), ("x", "y"))
    assert (second.text, second.passages, second.answers) == ("why?", (TWO,), ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": " "}, "line 1: found an empty 'question'"),
        ({"passages": []}, "line 1: found no 'question'"),
        ({"question": "q?", "passages": []}, "line 1: found an empty list 'passages'"),
        ({"question": "q?", "passages": [{"title": "x"}]}, "line 1: found no 'text'"),
        ({"question": "q?", "passages": [{"text": "x", "gold": 1}]}, "'gold' of a number"),
        ({"question": "q?"}, "line 1: found a question without passages; add"),
        ({"question": "q?", "answers": [""]}, r"line 1: found an empty 'answers\[0\]'"),
        ([], "line 1: found a line of a list, expected an object"),
    ],
)
def test_a_line_that_is_no_question_is_told_by_its_number(
    tmp_path: Path, line: Any, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(write(tmp_path / "q.jsonl", line), None, 3)


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found no line"):
        read_passages(write(tmp_path / "p.jsonl"))
