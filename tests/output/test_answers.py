"""Answers of the engine: parsed JSON, and thoughts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.output.answers import (
    Said,
    ThoughtReader,
    complete_json,
    has_no_thoughts,
    marks_thoughts,
)
from blockattn_rag.prompts.blocks import BlockPrompt


@pytest.mark.parametrize(
    ("text", "finish_reason", "value"),
    [
        ('{"ö": [1]}', "stop", {"ö": [1]}),
        (" 12", "stop", 12),
        ('"x"', "stop", "x"),
        ("null", "stop", None),
        ('{"a": 1}', "length", {"a": 1}),
        ("true", "length", True),
        ('"12"', "length", "12"),
    ],
)
def test_a_complete_answer_is_parsed(text: str, finish_reason: str, value: Any) -> None:
    assert complete_json(text, finish_reason) == value


@pytest.mark.parametrize("text", ['{"a": 1', "", "12", "-1.5"])
def test_an_answer_that_was_cut_off_raises(text: str) -> None:
    with pytest.raises(
        IncompleteAnswerError, match="was cut off at its token limit: raise max_new"
    ) as caught:
        complete_json(text, "length")
    assert caught.value.text == text


def test_the_error_for_incomplete_json_names_the_position() -> None:
    with pytest.raises(IncompleteAnswerError, match=r"remove stop strings.*line 1 column 5"):
        complete_json('{"a"', "stop")


def test_an_answer_that_is_nested_too_deeply_raises() -> None:
    for text in ("[" * 100_000 + "]" * 100_000, '{"a":' * 100_000):
        with pytest.raises(IncompleteAnswerError, match="nested too deeply to be parsed") as caught:
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
def test_a_grammar_determines_whether_thoughts_are_possible(options: Any, expected: bool) -> None:
    assert has_no_thoughts(options) is expected


THINKS = SimpleNamespace(chat_template="{% if enable_thinking %}<think>\n</think>{% endif %}")
PLAIN = SimpleNamespace(chat_template="{{ messages }}")
ASKED = BlockPrompt.from_texts(["<|user|>\nHow?<|assistant|>\n"])
OPENED = BlockPrompt.from_texts(["<|user|>\nHow?<|assistant|>\n<think>\n"])

CASES = [
    ("<think>\nA b.\n\n</think>\n\nYes.", ASKED, Said("A b.", "Yes.")),
    ("\n <think>a</think>b", ASKED, Said("a", "b")),
    ("A b.\n</think>\n\nYes.\n", OPENED, Said("A b.", "Yes.\n")),
    ("<think>\n\n</think>\n\nYes.", ASKED, Said("", "Yes.")),
    ("<think>\nstill at", ASKED, Said("still at", "")),
    ("<think>\nalmost </thin", ASKED, Said("almost </thin", "")),
    ("<think>a < b </ c</think>d", ASKED, Said("a < b </ c", "d")),
    ("<think>a\n\n b</think>\n", ASKED, Said("a\n\n b", "")),
    (" Yes <think>no</think>", ASKED, Said("", " Yes <think>no</think>")),
    ("<thin", ASKED, Said("", "<thin")),
    (" ", ASKED, Said("", " ")),
    ("", OPENED, Said("", "")),
    ("<think>a</think>b</think>c", ASKED, Said("a", "b</think>c")),
]


@pytest.mark.parametrize(("text", "prompt", "said"), CASES)
def test_pieces_add_up_to_the_parsed_answer(text: str, prompt: BlockPrompt, said: Said) -> None:
    assert ThoughtReader(THINKS, prompt).push(text, is_last=True) == said
    for size in (1, 2, 3, 5, 8):
        reader = ThoughtReader(THINKS, prompt)
        pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
        pieces.append(reader.push("", is_last=True))
        assert Said("".join(p.thoughts for p in pieces), "".join(p.answer for p in pieces)) == said


def test_thoughts_are_streamed_as_soon_as_they_are_certain() -> None:
    reader = ThoughtReader(THINKS, ASKED)
    pieces = ("<think>", "one", " two", "</th", "ing", "</think>", "\n\n", "Yes")
    assert [tuple(reader.push(piece)) for piece in pieces] == [
        ("", ""), ("one", ""), (" two", ""), ("", ""), ("</thing", ""), ("", ""), ("", ""),
        ("", "Yes"),
    ]  # fmt: skip


@pytest.mark.parametrize("prompt", [ASKED, OPENED])
def test_without_thought_delimiters_there_are_no_thoughts(prompt: BlockPrompt) -> None:
    text = "<think>a</think>b"
    assert ThoughtReader(PLAIN, prompt).push(text, is_last=True) == Said("", text)
    assert (marks_thoughts(THINKS), marks_thoughts(PLAIN)) == (True, False)
    assert not marks_thoughts(SimpleNamespace(chat_template=None))
