"""Detection of repetitive answers, and ending of repetitive JSON strings."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.model.repetition import (
    CHARACTERS,
    DATA_COPIES,
    DATA_TOKENS,
    LATER_TOKENS,
    LONGEST_UNIT,
    STRING_COPIES,
    STRING_TOKENS,
    TEXT_COPIES,
    TEXT_TOKENS,
    TEXT_WORD_COPIES,
    Decode,
    JsonStrings,
    LoopEndingMatcher,
    LoopGuard,
    Repetition,
)
from blockattn_rag.output.grammar import parse_grammar


def letters(ids: Sequence[int]) -> str:
    """Decode tokens that are code points of characters."""
    return "".join(map(chr, ids))


def codes(text: str) -> list[int]:
    return [ord(character) for character in text]


def first_found(ids: Sequence[int], decode: Decode = letters) -> int | None:
    """Return the number of tokens after which a loop is detected in free text."""
    repetition = Repetition(decode, TEXT_TOKENS, TEXT_COPIES, TEXT_WORD_COPIES)
    found = (at for at, token in enumerate(ids, 1) if repetition.push(token))
    return next(found, None)


SENTENCES = {ord("a"): "He sat. ", ord("b"): "She walked home. ", ord("c"): "Why not now? "}


def spoken(ids: Sequence[int]) -> str:
    """Decode tokens that are one sentence each."""
    return "".join(SENTENCES[token] for token in ids)


def word(ids: Sequence[int]) -> str:
    """Decode tokens that are one word each, made of a repeated letter."""
    return "".join(3 * chr(token) + " " for token in ids)


def repeats(ids: Sequence[int], least: int, copies: int) -> bool:
    """Reference implementation of the rule for tokens that are sentences."""
    for size in range(1, min(LONGEST_UNIT, len(ids)) + 1):
        filled = max(copies * size, least)
        end = ids[-filled:]
        if len(ids) >= filled and all(a == b for a, b in zip(end, end[size:], strict=False)):
            return True
    return False


@pytest.mark.parametrize("words", [3, 4, 19, 25, 26])
def test_prose_is_a_loop_after_the_minimum_length(words: int) -> None:
    unit = list(range(ord("a"), ord("a") + words))
    needed = max(TEXT_COPIES * words, TEXT_TOKENS)
    before = codes("ABCDE")
    assert first_found(before + unit * 200, word) == len(before) + needed


@pytest.mark.parametrize("unit", ["x", "| yes | no |\n", "    return None\n", "null, "])
def test_other_text_is_a_loop_after_many_more_copies(unit: str) -> None:
    needed = max(len(unit) * DATA_COPIES, DATA_TOKENS)
    assert first_found(codes(unit * (DATA_TOKENS + 1))) == needed


def strip(ids: Sequence[int]) -> str:
    """Decode like SentencePiece tokenizers, which strip the leading space."""
    return letters(ids).strip()


@pytest.mark.parametrize("unit", ["我今天去学校。", "He sat. "])
@pytest.mark.parametrize("decode", [letters, strip])
def test_prose_also_needs_a_minimum_number_of_characters(unit: str, decode: Decode) -> None:
    found = first_found(codes(unit * 60), decode)
    assert found is not None
    assert CHARACTERS * TEXT_TOKENS <= found <= CHARACTERS * TEXT_TOKENS + 2 * len(unit)


def test_a_unit_longer_than_the_maximum_is_not_a_loop() -> None:
    unit = list(range(0x4E00, 0x4E00 + LONGEST_UNIT + 1))  # one letter per token
    assert first_found(unit * 5) is None
    assert first_found(unit[:-1] * 5) == TEXT_COPIES * LONGEST_UNIT


@given(
    st.lists(st.integers(97, 99), max_size=5),
    st.lists(st.integers(97, 99), min_size=1, max_size=9),
    st.integers(0, 12),
    st.lists(st.integers(97, 99), max_size=5),
    st.integers(1, 30),
    st.integers(2, 4),
)
def test_the_rule_holds_at_each_token(
    before: list[int], unit: list[int], times: int, after: list[int], least: int, copies: int
) -> None:
    ids = before + unit * times + after
    repetition = Repetition(spoken, least, copies, copies)
    for at, token in enumerate(ids, 1):
        found = repetition.push(token)
        assert bool(found) == repeats(ids[:at], least, copies)
        assert not found or tuple(ids[at - len(found) : at]) == found


def follow(text: str) -> JsonStrings:
    strings = JsonStrings(letters)
    strings.follow(codes(text))
    return strings


LOOP = "He sat. " * 30


def test_a_repetitive_string_must_end() -> None:
    assert follow('{"a": "' + LOOP).must_end
    assert not follow('{"a": "' + LOOP[: CHARACTERS * STRING_TOKENS - 1]).must_end


def test_strings_are_distinguished_from_surrounding_json() -> None:
    assert not follow('{"a": [' + '"He sat.", ' * 30).has_loop
    ended = follow('{"a": "' + LOOP + '", "b": "')
    assert ended.has_loop
    assert not ended.must_end


def test_an_escaped_quote_does_not_end_a_string() -> None:
    assert follow('{"a": "' + r"\"No,\" he said. " * 30).must_end
    assert not follow('{"a": "' + LOOP + "\\").must_end  # a quote would be escaped here
    assert follow('{"a": "' + LOOP + r"\"").must_end
    assert follow('{"a": "' + LOOP + "\\\\").must_end


def test_a_long_unit_repeated_in_a_string_is_a_loop() -> None:
    unit = (
        "He likes toys and his friends. She likes her friends and toys. They like to play together "
        "all day long. "
    )
    assert len(unit) * STRING_COPIES > CHARACTERS * STRING_TOKENS
    assert follow('{"a": "Well. ' + unit * STRING_COPIES).must_end
    assert not follow('{"a": "Well. ' + (unit * STRING_COPIES)[:-9]).must_end


@pytest.mark.parametrize(
    "unit", ["to be or ", "He sat. ", "We eat ha" + "m" * LATER_TOKENS + " ", "He sat down by us. "]
)
def test_a_later_string_ends_once_it_continues_the_loop(unit: str) -> None:
    begin = '{"a": "' + unit * STRING_TOKENS + '", "b": "1'
    loop = unit * (LATER_TOKENS + 3)
    assert not follow(begin + loop[: LATER_TOKENS - 1]).must_end
    assert follow(begin + loop[:LATER_TOKENS]).must_end
    assert follow(begin + loop[3 : 3 + LATER_TOKENS]).must_end


def test_a_later_string_may_contain_words_of_an_earlier_loop() -> None:
    begin = '{"a": "' + "to be or " * 30 + '", "b": "'
    assert not follow(begin + "The question is to be or not to be").must_end
    begin = '{"a": "' + LOOP + '", "b": "Then '
    assert not follow(begin + "He sat. But He sat. Then He sat" + " down" * 3).must_end


TAGS = {
    "triggers": ["<call="],
    "structures": [{"begin": "<call=f>", "schema": {"type": "object"}, "end": "</call>"}],
}
AMONG_TEXT = pytest.mark.parametrize(
    "asked",
    [{"structural_tag": TAGS}, {"grammar": 'start: /.*/ call\ncall: %json {"type": "object"}'}],
    ids=["tags", "grammar"],
)


def guarded(text: str, asked: dict[str, object]) -> bool:
    """Whether the guard for an answer with this grammar detects a loop in the text."""
    guard = LoopGuard(letters, parse_grammar(None, asked))
    for token in codes(text):
        guard.push(token)
    assert not guard.must_end  # ended by the matcher of the grammar instead
    return guard.has_loop


TEXTS_BEFORE = {
    "odd quote": 'A 5" pipe. ',
    "brace": 'Write {x or 5" of it: ',
    "citation": 'As [1] says, 5" or [2, 3]: ',
    "mark": '[TOOL_CALLS] 5" ',
    "unclosed string": 'Say ["so.\n',
    "another call": '<call=f>{"q": ["5\\" {"], "r": {}}</call> and 5" of ',
}


@AMONG_TEXT
@pytest.mark.parametrize("before", TEXTS_BEFORE.values(), ids=TEXTS_BEFORE)
def test_quotes_before_json_do_not_start_a_string(before: str, asked: dict[str, object]) -> None:
    assert guarded(before + '<call=f>{"q": "' + LOOP, asked)
    assert not guarded(before + '<call=f>{"q": [' + "true, " * 60, asked)
    assert not guarded(before + '<call=f>{"q": [' + '"He sat.", ' * 30, asked)
    strings = JsonStrings(letters, among_text=True)
    strings.follow(codes(before + '<call=f>{"q": "' + LOOP))
    assert strings.must_end
    assert not strings.text_must_end


@AMONG_TEXT
def test_repeated_text_around_json_is_a_loop(asked: dict[str, object]) -> None:
    call = '<call=f>{"q": "a"}</call>'
    cited = "He sat [1]. " * 40
    assert guarded(cited, asked)
    assert guarded(call + cited, asked)
    assert not guarded(call * 20, asked)
    assert not guarded((call + cited[: TEXT_TOKENS // 2] + "\n") * 3, asked)
    assert not guarded("[true]\n" * 40 + '{"kind": "yes"}\n' * 40, asked)


def test_a_different_answer_resets_the_state() -> None:
    strings = follow('{"a": "' + LOOP)
    strings.follow(codes('{"a": "He sat.'))
    assert not strings.has_loop


@given(st.lists(st.text(max_size=20), max_size=6))
def test_strings_shorter_than_a_loop_need_not_end(texts: list[str]) -> None:
    assert not follow(json.dumps([text + "a" for text in texts])[: 6 * STRING_TOKENS]).must_end


class Anything:
    """A grammar that always allows these tokens."""

    def __init__(self, tokens: str) -> None:
        self._tokens = codes(tokens)

    def follow(self, ids: Sequence[int]) -> bool:
        return True

    def allowed(self, vocabulary: int, ends: object) -> np.ndarray:
        allowed = np.zeros(vocabulary, bool)
        allowed[self._tokens] = True
        return allowed


@pytest.mark.parametrize(
    ("tokens", "expected"), [('abc"', '"'), ("abc", "abc")], ids=["quote", "no quote"]
)
def test_a_repetitive_string_may_only_end_if_its_schema_allows(tokens: str, expected: str) -> None:
    matcher = LoopEndingMatcher(Anything(tokens), JsonStrings(letters), np.array([ord('"')]))
    assert matcher.follow(codes('{"a": "He'))
    assert letters(np.flatnonzero(matcher.allowed(128, ())).tolist()) == "".join(sorted(tokens))
    assert matcher.follow(codes('{"a": "' + LOOP))
    assert letters(np.flatnonzero(matcher.allowed(128, ())).tolist()) == "".join(sorted(expected))


@pytest.mark.parametrize(("tokens", "expected"), [("abc.", "."), ("abc", "abc")])
def test_repetitive_text_around_json_may_only_end(tokens: str, expected: str) -> None:
    none, long = np.array([], int), LOOP * 2
    matcher = LoopEndingMatcher(Anything(tokens), JsonStrings(letters, among_text=True), none)
    for text, possible in ((long, expected), (long + "{", tokens)):
        assert matcher.follow(codes(text))
        allowed = np.flatnonzero(matcher.allowed(128, [ord(".")])).tolist()
        assert letters(allowed) == "".join(sorted(possible))
