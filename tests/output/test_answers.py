"""Answers that are to be JSON: whole, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.output.answers import complete_json
from blockattn_rag.output.thinking import has_no_thoughts


@pytest.mark.parametrize(
    ("text", "value"), [('{"ö": [1]}', {"ö": [1]}), (" 12", 12), ('"x"', "x"), ("null", None)]
)
def test_a_whole_answer_is_its_value(text: str, value: Any) -> None:
    assert complete_json(text, "stop") == value


@pytest.mark.parametrize("text", ['{"a": 1', "", "12", "-1.5"])
def test_an_answer_that_was_cut_is_none(text: str) -> None:
    with pytest.raises(
        IncompleteAnswerError, match="was cut off at its token limit; raise max_new"
    ) as caught:
        complete_json(text, "length")
    assert caught.value.text == text


@pytest.mark.parametrize("text", ['{"a": 1}', "true", '"12"'])
def test_an_answer_that_was_whole_when_it_was_cut_is_taken(text: str) -> None:
    assert complete_json(text, "length") is not None


def test_an_answer_that_ended_too_soon_says_where() -> None:
    with pytest.raises(IncompleteAnswerError, match=r"remove stop strings.*line 1 column 5"):
        complete_json('{"a"', "stop")


def test_an_answer_that_is_nested_too_deeply_says_so() -> None:
    for text in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000):
        with pytest.raises(IncompleteAnswerError, match="nested too deeply to be read") as caught:
            complete_json(text, "stop")
        assert caught.value.text == text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"structured_outputs": {"choice": ["a"]}}, True),
        ({"structured_outputs": {"grammar": 'start: /[^<]*/ "</think>" "a"'}}, False),
        ({"structured_outputs": {"structural_tag": "{}"}}, False),
    ],
)
def test_a_grammar_tells_whether_thoughts_may_come(options: Any, expected: bool) -> None:
    assert has_no_thoughts(options) is expected
