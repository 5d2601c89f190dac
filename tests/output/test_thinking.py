"""Thoughts and answers apart, whole and piece by piece."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from blockattn_rag.output.thinking import Said, ThoughtReader, marks_thoughts
from blockattn_rag.prompts.blocks import BlockPrompt

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
def test_pieces_are_read_as_the_whole(text: str, prompt: BlockPrompt, said: Said) -> None:
    assert ThoughtReader(THINKS, prompt).finish(text) == said
    for size in (1, 2, 3, 5, 8):
        reader = ThoughtReader(THINKS, prompt)
        pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
        pieces.append(reader.finish())
        assert Said("".join(p.thoughts for p in pieces), "".join(p.answer for p in pieces)) == said


def test_thoughts_come_as_soon_as_they_are_certain() -> None:
    reader = ThoughtReader(THINKS, ASKED)
    pieces = ("<think>", "one", " two", "</th", "ing", "</think>", "\n\n", "Yes")
    assert [tuple(reader.push(piece)) for piece in pieces] == [
        ("", ""), ("one", ""), (" two", ""), ("", ""), ("</thing", ""), ("", ""), ("", ""),
        ("", "Yes"),
    ]  # fmt: skip


@pytest.mark.parametrize("prompt", [ASKED, OPENED])
def test_a_template_that_marks_no_thoughts_has_none(prompt: BlockPrompt) -> None:
    text = "<think>a</think>b"
    assert ThoughtReader(PLAIN, prompt).finish(text) == Said("", text)
    assert (marks_thoughts(THINKS), marks_thoughts(PLAIN)) == (True, False)
    assert not marks_thoughts(SimpleNamespace(chat_template=None))
