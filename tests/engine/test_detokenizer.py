"""Detokenization: complete characters, no stop strings, and pieces that add up to the text."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.engine.detokenizer import Detokenizer
from tests.models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()  # one token per byte
END = 257


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def pieces(ids: list[int], *stop: str) -> tuple[Detokenizer, list[str]]:
    answer = Detokenizer(TOKENIZER, stop)
    return answer, [*(answer.push(token) for token in ids), answer.finish()]


@given(st.text())
def test_pieces_add_up_to_the_text(text: str) -> None:
    answer, parts = pieces(ids_of(text))
    assert "".join(parts) == answer.text == text
    assert not answer.stopped


@given(st.lists(st.integers(0, 263), max_size=30))
def test_pieces_of_any_tokens_add_up_to_the_decoded_text(ids: list[int]) -> None:
    answer, parts = pieces(ids)
    assert "".join(parts) == answer.text
    # Invalid bytes around a control token may be grouped differently.
    expected = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert answer.text.replace("\ufffd", "") == expected.replace("\ufffd", "")


def test_a_character_of_several_tokens_is_returned_when_complete() -> None:
    _, parts = pieces(ids_of("aé🙂"))
    assert parts == ["a", "", "é", "", "", "", "🙂", ""]


def test_an_incomplete_character_is_returned_at_the_end() -> None:
    _, parts = pieces(ids_of("é")[:1])
    assert parts == ["", "\ufffd"]


def test_control_tokens_are_not_part_of_the_text() -> None:
    answer, _ = pieces([*ids_of("yes"), END])
    assert answer.text == "yes"


@given(st.text("ab\n", max_size=20), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str]) -> None:
    # A stop string matches at its last character; of several, the one that starts first counts.
    ends = [at + len(stop) for stop in stops if (at := text.find(stop)) >= 0]
    seen = text[: min(ends)] if ends else text
    expected = seen[: min((at for s in stops if (at := seen.find(s)) >= 0), default=len(seen))]
    answer, parts = pieces(ids_of(text), *stops)
    assert "".join(parts) == answer.text == expected
    assert answer.stopped == bool(ends)


def test_a_possible_stop_string_is_held_back_until_it_cannot_match() -> None:
    answer, parts = pieces(ids_of("a\n\nb\nc"), "\n\n\n")
    assert parts[:4] == ["a", "", "", "\n\nb"]
    assert answer.text == "a\n\nb\nc"


def test_nothing_is_returned_after_a_stop_string() -> None:
    answer, parts = pieces(ids_of("yesSTOPno"), "STOP")
    assert answer.text == "".join(parts) == "yes"
    assert answer.stopped
