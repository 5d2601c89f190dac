"""Questions and passages: reading files and drawing samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.lab.repair.data import (
    Material,
    Question,
    distinct_questions,
    draw_samples,
    read_passages,
    read_questions,
)
from blockattn_rag.prompts import BlockPrompt, Passage
from tests.lab.evaluation.samples import write_jsonl

PASSAGES = [Passage(f"t{number}", f"text {number}") for number in range(6)]
QUESTIONS = [
    Question(f"question {n}?", (PASSAGES[n], *(p for p in PASSAGES if p != PASSAGES[n])))
    for n in range(4)
]


def test_samples_contain_the_first_passage_and_random_others() -> None:
    samples = draw_samples(QUESTIONS, 80, 1, 4, seed=0)
    for number, sample in enumerate(samples):
        question = QUESTIONS[number % 4]
        assert sample.text == question.text
        assert question.passages[0] in sample.passages
        assert len(set(sample.passages)) == len(sample.passages)
    assert {len(sample.passages) for sample in samples} == {1, 2, 3, 4}
    places = {s.passages.index(QUESTIONS[n % 4].passages[0]) for n, s in enumerate(samples)}
    assert places == {0, 1, 2, 3}
    assert len({samples[number].passages for number in range(0, 80, 4)}) > 10


def test_the_seed_determines_the_samples() -> None:
    assert draw_samples(QUESTIONS, 9, 1, 4, 1) == draw_samples(QUESTIONS, 9, 1, 4, 1)
    assert draw_samples(QUESTIONS, 9, 1, 4, 1) != draw_samples(QUESTIONS, 9, 1, 4, 2)


def test_samples_of_questions_with_few_passages_contain_all_of_them_and_the_answers() -> None:
    lone = Question("why so?", tuple(PASSAGES[:2]), ("so", "thus"))
    samples = draw_samples([lone], 3, 5, 5, 0)
    assert [len(sample.passages) for sample in samples] == [2, 2, 2]
    assert samples[0].answers == ("so", "thus")


def test_questions_are_distinct_ignoring_case_in_an_order_of_the_seed() -> None:
    shouted = Question(QUESTIONS[0].text.upper(), QUESTIONS[0].passages)
    found = distinct_questions([*QUESTIONS, QUESTIONS[1], shouted], seed=0)
    assert {one.text.lower() for one in found} == {one.text for one in QUESTIONS}
    assert len(found) == 4
    assert found == distinct_questions([shouted, *reversed(QUESTIONS[1:])], seed=0)
    assert found != distinct_questions(found, seed=1)


@pytest.mark.parametrize(("text", "passages"), [(" ", PASSAGES), ("what?", [])])
def test_a_question_without_text_or_passages_is_refused(text: str, passages: list[Passage]) -> None:
    with pytest.raises(DataError, match="Expected a question with at least one passage"):
        Question(text, tuple(passages))


ONE, TWO = Passage("one", "the first"), Passage("", "the second")


def nearest(text: str, count: int) -> Sequence[Passage]:
    return [TWO, ONE][:count]


def test_duplicate_passages_are_read_once(tmp_path: Path) -> None:
    lines = {"title": "one", "text": " the first\n"}, {"text": "the second", "id": 3}
    assert read_passages(write_jsonl(tmp_path / "p.jsonl", [*lines, lines[0]])) == [ONE, TWO]


def test_questions_use_their_own_passages_gold_first_or_the_nearest(tmp_path: Path) -> None:
    own = {
        "question": "which?",
        "answers": ["x", "y"],
        "passages": [{"title": "one", "text": "the first"}, {"text": "the second", "gold": True}],
    }
    path = write_jsonl(tmp_path / "q", [own, {"question": "why?"}])
    first, second = read_questions(path, nearest, 1)
    assert (first.text, first.passages, first.answers) == ("which?", (TWO, ONE), ("x", "y"))
    assert (second.text, second.passages, second.answers) == ("why?", (TWO,), ())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": " "}, "line 1: Found an empty 'question'"),
        ({"passages": []}, "line 1: Missing key 'question'"),
        (
            {"question": "q?", "passages": [{"text": "x", "gold": 1}]},
            r"a number for 'passages\[0\].gold'",
        ),
        ({"question": "q?"}, "line 1: A question has no passages; add"),
    ],
)
def test_reports_invalid_lines_by_number(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(write_jsonl(tmp_path / "q.jsonl", [line]), None, 3)


def test_titles_of_passages_are_part_of_the_input_of_a_run() -> None:
    def inputs(title: str) -> dict[str, str]:
        question = Question("How high?", (Passage(title, "It is high."),))
        return Material(lambda *_: BlockPrompt((), ""), "chat", questions=[question]).inputs()

    assert inputs("Tower") == inputs("Tower")
    assert inputs("Tower") != inputs("Bridge")
