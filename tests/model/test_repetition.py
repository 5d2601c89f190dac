"""When an answer counts as repeating itself, and how a JSON string that does must end."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.model.repetition import (
    COPIES,
    LONGEST_UNIT,
    STRING_TOKENS,
    TEXT_TOKENS,
    JsonStrings,
    Repetition,
    StringEndingMatcher,
)

REFRAIN = "Row, row, row your boat,\ngently down the stream.\n"
LEGITIMATE = {
    "table of equal numbers": "| 0 | 0 | 0 |\n" * 40,
    "array of equal numbers": "[" + "0.25, " * 200 + "1]",
    "rule": "-" * 500 + "\n",
    "blank lines": "\n" * 300,
    "poem with a refrain": "".join(
        f"{REFRAIN}Verse {n} is about the {n * 7}.\n" for n in range(20)
    ),
    "refrain sung twice": REFRAIN + REFRAIN + "The end.",
    "table with equal cells": "".join(f"| row {n} | yes | no |\n" for n in range(60)),
    "numbered lines": "".join(f"x[{n}] = value\n" for n in range(60)),
    "equal lines of code": "    pass\n" * 20,
    "laughter": "ha " * 40,
    "array of objects": json.dumps([{"name": f"item {n}", "kind": "a"} for n in range(60)]),
}


def letters(ids: Sequence[int]) -> str:
    """Text of tokens that are characters by their code points."""
    return "".join(map(chr, ids))


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


class Words:
    """Tokens of words and marks, numbered as they come."""

    def __init__(self, text: str) -> None:
        pieces = re.findall(r" ?\w+|\W", text)
        self.known = list(dict.fromkeys(pieces))
        self.ids = [self.known.index(piece) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.known[one] for one in ids)


def first_found(ids: Sequence[int], least: int, decode: object = letters) -> int | None:
    """Tokens after which a loop is found."""
    repetition = Repetition(decode, least)  # type: ignore[arg-type]
    found = (at for at, token in enumerate(ids, 1) if repetition.push(token))
    return next(found, None)


def repeats(ids: Sequence[int], least: int) -> bool:
    """The rule of the module, word by word."""
    for size in range(1, min(LONGEST_UNIT, len(ids)) + 1):
        filled = max(COPIES * size, least)
        end = ids[-filled:]
        if len(ids) >= filled and all(a == b for a, b in zip(end, end[size:], strict=False)):
            return any(map(str.isalpha, letters(ids[-size:])))
    return False


@pytest.mark.parametrize("text", LEGITIMATE.values(), ids=LEGITIMATE)
def test_repetition_that_people_write_is_no_loop(text: str) -> None:
    words = Words(text)
    assert first_found(words.ids, TEXT_TOKENS, words.decode) is None


@pytest.mark.parametrize("words", [1, 4, 19, 38, 60])
def test_a_unit_is_a_loop_once_it_fills_the_end(words: int) -> None:
    unit = list(range(ord("a"), ord("a") + words))
    needed = max(COPIES * words, TEXT_TOKENS)
    before = codes("0123456789 ")
    assert first_found(before + unit * 200, TEXT_TOKENS) == len(before) + needed


def test_a_unit_longer_than_the_longest_is_no_loop() -> None:
    unit = list(range(0x4E00, 0x4E00 + LONGEST_UNIT + 1))  # as many letters
    assert first_found(unit * 5, TEXT_TOKENS) is None
    assert first_found(unit[:-1] * 5, TEXT_TOKENS) == COPIES * LONGEST_UNIT


@given(
    st.lists(st.integers(97, 99), max_size=5),
    st.lists(st.sampled_from(codes("ab 1")), min_size=1, max_size=9),
    st.integers(0, 12),
    st.lists(st.integers(97, 99), max_size=5),
    st.integers(1, 30),
)
def test_the_rule_holds_at_each_token(
    before: list[int], unit: list[int], times: int, after: list[int], least: int
) -> None:
    ids = before + unit * times + after
    repetition = Repetition(letters, least)
    for at, token in enumerate(ids, 1):
        found = repetition.push(token)
        assert bool(found) == repeats(ids[:at], least)
        assert not found or tuple(ids[at - len(found) : at]) == found


def follow(text: str) -> JsonStrings:
    strings = JsonStrings(letters)
    strings.follow(codes(text))
    return strings


LOOP = "He sat. " * 30


def test_a_string_that_repeats_itself_must_end() -> None:
    assert follow('{"a": "' + LOOP).must_end
    assert not follow('{"a": "' + LOOP[: STRING_TOKENS - 1]).must_end


def test_a_string_is_told_from_what_surrounds_it() -> None:
    assert not follow('{"a": [' + '"He sat.", ' * 30).has_loop
    ended = follow('{"a": "' + LOOP + '", "b": "')
    assert ended.has_loop
    assert not ended.must_end


def test_an_escaped_quote_ends_no_string() -> None:
    assert follow('{"a": "' + r"\"No\" " * 30).must_end
    assert not follow('{"a": "' + LOOP + "\\").must_end  # a quote would be text
    assert follow('{"a": "' + LOOP + r"\"").must_end
    assert follow('{"a": "' + LOOP + "\\\\").must_end


def test_a_later_string_ends_at_the_first_copy_of_a_unit() -> None:
    begin = '{"a": "' + LOOP + '", "b": "Then he'
    assert not follow(begin + " sat").must_end
    assert follow(begin + " sat. He").must_end


def test_an_answer_that_is_not_the_previous_ones_continuation_is_read_anew() -> None:
    strings = follow('{"a": "' + LOOP)
    strings.follow(codes('{"a": "He sat.'))
    assert not strings.has_loop


@given(st.lists(st.text(max_size=20), max_size=6))
def test_strings_shorter_than_a_loop_are_none(texts: list[str]) -> None:
    assert not follow(json.dumps([text + "a" for text in texts])[: 6 * STRING_TOKENS]).must_end


class Anything:
    """A grammar of these tokens, whatever came."""

    def __init__(self, tokens: str) -> None:
        self._tokens = codes(tokens)

    def fresh(self) -> Anything:
        return Anything(letters(self._tokens))

    def follow(self, ids: Sequence[int]) -> bool:
        return True

    def allowed(self, vocabulary: int, ends: object) -> np.ndarray:
        allowed = np.zeros(vocabulary, bool)
        allowed[self._tokens] = True
        return allowed


@pytest.mark.parametrize(
    ("tokens", "expected"), [('abc"', '"'), ("abc", "abc")], ids=["quote", "no quote"]
)
def test_only_the_end_of_a_repeating_string_is_allowed_where_the_schema_allows_it(
    tokens: str, expected: str
) -> None:
    matcher = StringEndingMatcher(Anything(tokens), letters, np.array([ord('"')]))
    for one in (matcher, matcher.fresh()):
        assert one.follow(codes('{"a": "He'))
        assert letters(np.flatnonzero(one.allowed(128, ())).tolist()) == "".join(sorted(tokens))
        assert one.follow(codes('{"a": "' + LOOP))
        assert letters(np.flatnonzero(one.allowed(128, ())).tolist()) == "".join(sorted(expected))
