"""Loop detection: ends answers that repeat themselves.

With greedy decoding, a small model may repeat the same words until the token limit. An answer
repeats itself if it ends with consecutive copies of a unit of at most ``LONGEST_UNIT`` tokens. How
many copies are required depends on whether the unit is prose (``is_prose``), words without a
sentence (``is_words``), other text with words, or text without words, which never counts. The page
*Settings* of the documentation lists the rules, and what happens to the answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.output.grammar import Grammar

TEXT_TOKENS = 128
"""Minimum total tokens of the copies of prose or words in free text."""

STRING_TOKENS = 64
"""Minimum total tokens of the copies of prose or words in a JSON string. Fewer than in free text,
so that the rest of the object still fits in the answer."""

CHARACTERS = 3
"""Minimum number of characters in the copies of prose or words, per token of ``TEXT_TOKENS`` or
``STRING_TOKENS``. Matters in languages that the tokenizer splits into characters or bytes."""

TEXT_COPIES, STRING_COPIES = 5, 2
"""Number of copies of prose that count as a loop in free text, where a refrain may legitimately
occur a few times, and in a JSON string."""

TEXT_WORD_COPIES, STRING_WORD_COPIES = 64, 32
"""Number of copies of words without a sentence that count as a loop in free text, and in JSON."""

DATA_COPIES, DATA_TOKENS = 512, 2048
"""Number of copies of other text that count as a loop, and their minimum total tokens. Table rows,
lines of code and constants often repeat legitimately."""

LATER_TOKENS = 16
"""Tokens of a known loop after which a later JSON string is closed. Common phrases are shorter."""

LONGEST_UNIT = 128
"""Maximum length of a unit in tokens."""

_IN_TEXT = (TEXT_TOKENS, TEXT_COPIES, TEXT_WORD_COPIES)
_IN_STRING = (STRING_TOKENS, STRING_COPIES, STRING_WORD_COPIES)

_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789Eetruefalsn \t\r\n')
"""Characters of JSON outside strings: punctuation, white space, numbers and constants."""

_PERIODS = np.arange(1, LONGEST_UNIT + 1)

_MARKS = ".,;:!?…\"'“”‘’«»()[]*_-–—。，、；：！？「」『』।؟،۔"
"""Punctuation of prose. A token with other symbols, such as ``|``, ``=`` or ``<``, is data."""

_WORD = re.compile(r"[^\W\d_](?:[^\W\d_]|[^\x00-\x7f]|['-](?=[^\W\d_]))*")
_PAUSES = ".,;:!?…،؛。、，；：！？"
_CONSTANT = re.compile(r"null|none|nil|true|false|nan|inf|na|nop|[0-9a-f]+", re.IGNORECASE)
_BASES = re.compile("[ACGTUN]+")  # Letters of DNA and RNA bases.
_SENTENCE_END = re.compile(r"[.!?…।؟۔][*_”’»]*(?!\S)|[。！？][”’」』]*")

_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3000-\u30ff\u3400-\u9fff\uff00-\uff0f"
_CHARACTER_END = re.compile(rf"(?<=[{_UNSPACED}])(?=\w)")
"""End of a character in a script without spaces, where each character counts as a word."""

Decode = Callable[[Sequence[int]], str]
"""Function that decodes token ids to text."""


# A loop has up to LONGEST_UNIT texts, because its unit can start at any token.
@lru_cache(maxsize=4 * LONGEST_UNIT)
def is_prose(copies: str) -> bool:
    """Whether three copies of a unit consist mostly of sentences.

    In text with line breaks, a sentence is a line with sentence punctuation at its end. Text
    without line breaks may be part of a sentence that never ends.
    """
    text = copies.replace("\\n", "\n").replace('\\"', '"')  # Undo the escapes of JSON strings.
    text = _CHARACTER_END.sub(" ", text)
    # A unit may begin anywhere, so its first and last line or word may be incomplete.
    lines = text.splitlines(keepends=True)[1:-1] or [" ".join(text.split()[1:-1])]
    return 2 * sum(len(line) for line in lines if _is_sentence(line)) > sum(map(len, lines))


def _is_sentence(line: str) -> bool:
    """Whether a line consists mostly of words, and has at least 2 different words (3 without a
    sentence end). A line that ends with a line break must also end a sentence."""
    ends = [match.end() for match in _SENTENCE_END.finditer(line)]
    if line.endswith("\n") and not (ends and not line[ends[-1] :].strip()):
        return False
    tokens = [token for token in line.split() if token.strip(_MARKS)]
    words = _words(line)
    # At least one word must not be separated from the next word by punctuation.
    has_phrase = any(map(_WORD.fullmatch, tokens))
    least = 2 if ends else 3
    return has_phrase and 2 * len(words) > len(tokens) and len(set(words)) >= least


@lru_cache(maxsize=4 * LONGEST_UNIT)
def is_words(copies: str) -> bool:
    """Whether three copies of a unit consist only of words in one line.

    Constants, quoted words and lists of different words are data.
    """
    tokens = copies.split()[1:-1]  # The first and last word may be incomplete.
    words = [token.strip(_PAUSES) for token in tokens]
    is_list = len(set(words)) > 1 and not any(map(_WORD.fullmatch, tokens))
    is_line = len(copies.splitlines()) == 1
    return is_line and not is_list and bool(words) and all(map(_is_plain, words))


def _is_plain(word: str) -> bool:
    """Whether a token is a word of at least two letters, and neither a constant nor DNA."""
    is_data = _CONSTANT.fullmatch(word) or _BASES.fullmatch(word)
    return bool(_WORD.fullmatch(word)) and sum(map(str.isalpha, word)) > 1 and not is_data


def _words(text: str) -> list[str]:
    """Whitespace-separated tokens that are words. ``0x00``, ``n/a`` and ``<td>`` are not words."""
    tokens = (token.strip(_MARKS) for token in text.split())
    return [token.casefold() for token in tokens if _WORD.fullmatch(token)]


class Repetition:
    """Detects repeated units at the end of a text.

    Args:
        least_tokens: Minimum total number of tokens in all copies.
        copies: Minimum number of copies of a unit that contains a sentence.
        word_copies: Minimum number of copies of a unit that consists of words.
    """

    def __init__(self, decode: Decode, least_tokens: int, copies: int, word_copies: int) -> None:
        self._decode = decode
        self._word_copies = word_copies
        self._needed = np.maximum(_PERIODS * copies, least_tokens)
        self._needed_characters = CHARACTERS * least_tokens
        self._recent = np.full(LONGEST_UNIT, -1)  # Newest token first.
        self._equal = np.zeros(LONGEST_UNIT, int)  # Length of the match for each period.

    def push(self, token: int) -> tuple[int, ...]:
        """Add a token. Returns the unit of the loop that the text now ends with, or ``()``."""
        self._equal = (self._equal + 1) * (self._recent == token)
        self._recent = np.roll(self._recent, 1)
        self._recent[0] = token
        filled = self._equal + _PERIODS
        found = np.flatnonzero(filled >= self._needed)
        if not found.size:
            return ()
        unit = tuple(self._recent[found[0] :: -1].tolist())
        return unit if self._counts(unit, int(filled[found[0]])) else ()

    def _counts(self, unit: tuple[int, ...], tokens: int) -> bool:
        """Whether copies of a unit count as a loop if they fill ``tokens`` tokens."""
        text = self._decode(3 * unit)
        if is_prose(text) or (tokens >= self._word_copies * len(unit) and is_words(text)):
            return tokens * len(text) >= self._needed_characters * len(3 * unit)
        return tokens >= max(DATA_COPIES * len(unit), DATA_TOKENS) and bool(_words(text))


class JsonStrings:
    """Tracks repetition in the JSON strings of an answer, and in the text around the JSON.

    With ``among_text``, JSON begins at ``{`` or ``[``, and ends at the matching bracket, or at a
    character that is invalid in JSON. A string outside brackets is text. ``has_loop``: Whether a
    string, or the text around the JSON, has repeated itself.
    """

    def __init__(self, decode: Decode, *, among_text: bool = False) -> None:
        self._decode = decode
        self._among_text = among_text
        self._begin()

    def _begin(self) -> None:
        self.has_loop = False
        self._ids: list[int] = []
        self._depth = 0  # Number of open brackets.
        self._is_open = self._is_escaped = False
        self._loops: set[tuple[int, ...]] = set()  # All LATER_TOKENS-grams of known loops.
        self._begin_string()
        self._begin_text()

    def _begin_string(self) -> None:
        self._repetition = Repetition(self._decode, *_IN_STRING)
        self._string: list[int] = []
        self._repeats = False

    def _begin_text(self) -> None:
        self._text = Repetition(self._decode, *_IN_TEXT)
        self._text_repeats = self._has_data = False

    @property
    def must_end(self) -> bool:
        """Whether the open string repeats itself, and a quotation mark would close it."""
        return self._repeats and not self._is_escaped

    @property
    def text_must_end(self) -> bool:
        """Whether the answer ends with text outside of JSON that repeats itself."""
        return self._text_repeats and self._depth == 0

    def follow(self, ids: Sequence[int]) -> None:
        """Process an answer so far. It need not continue the answer of the previous call."""
        if self._ids != ids[: len(self._ids)]:
            self._begin()
        for token in ids[len(self._ids) :]:
            self.push(token)

    def push(self, token: int) -> None:
        self._ids.append(token)
        borders = [self._reads_border(character) for character in self._decode([token])]
        if any(borders):
            self._begin_string()
        elif self._is_open:
            self._take(token)
        if self._among_text:  # Brackets and numbers may belong to the text around JSON.
            self._text_repeats |= bool(self._text.push(token)) and self._depth == 0
            self.has_loop |= self._text_repeats

    def _reads_border(self, character: str) -> bool:
        """Process a character, and return whether it opens or closes a string."""
        was_open = self._is_open
        if self._among_text and not was_open:
            self._note_depth(character)
        is_json = self._depth > 0 or not self._among_text
        if was_open and self._among_text and character == "\n":
            # A line break is invalid in a JSON string.
            self._depth, self._is_open = 0, False
        elif is_json and character == '"' and not self._is_escaped:
            self._is_open = not was_open
        self._is_escaped = self._is_open and character == "\\" and not self._is_escaped
        return self._is_open != was_open

    def _note_depth(self, character: str) -> None:
        """Update the depth of brackets for a character outside strings."""
        was_json = self._depth > 0
        self._depth += (character in "{[") - (was_json and character in "}]")
        if was_json and self._depth == 0 and self._has_data:
            self._begin_text()
        elif character not in _OUTSIDE_STRINGS:
            self._depth = 0
        # A bare "[1]" is a citation: the text continues after it.
        inside = was_json and (character == '"' or character.isalpha())
        self._has_data = self._depth > 0 and (self._has_data or inside)

    def _take(self, token: int) -> None:
        self._string.append(token)
        if unit := self._repetition.push(token):
            loop = unit * (2 + LATER_TOKENS // len(unit))
            self._loops |= {loop[at : at + LATER_TOKENS] for at in range(len(unit))}
            self._repeats = True
        self._repeats |= tuple(self._string[-LATER_TOKENS:]) in self._loops
        self.has_loop |= self._repeats


class Matching(Protocol):
    """Matches one answer against a grammar; see ``blockattn_rag.output.compiler.Matcher``."""

    def follow(self, ids: Sequence[int]) -> bool: ...

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]: ...


class LoopEndingMatcher:
    """Matcher that wraps another, and ends JSON strings and text that repeat themselves.

    ``quotes``: Ids of the tokens that begin with a quotation mark.
    """

    def __init__(self, matcher: Matching, strings: JsonStrings, quotes: NDArray[np.int_]) -> None:
        self._matcher, self._strings, self._quotes = matcher, strings, quotes

    def follow(self, ids: Sequence[int]) -> bool:
        self._strings.follow(ids)
        return self._matcher.follow(ids)

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]:
        allowed = self._matcher.allowed(vocabulary, ends)
        if self._strings.must_end:
            closing = self._quotes[self._quotes < vocabulary]
        elif self._strings.text_must_end:
            closing = np.array(sorted(ends), int)
        else:
            return allowed
        only = np.zeros_like(allowed)
        only[closing] = allowed[closing]
        return only if only.any() else allowed


class LoopGuard:
    """Detects loops, token by token, in an answer without a grammar or with a grammar for JSON."""

    def __init__(self, decode: Decode, grammar: Grammar | None) -> None:
        self._text = Repetition(decode, *_IN_TEXT) if grammar is None else None
        has_json, among_text = holds_json(grammar), has_text(grammar)
        self._strings = JsonStrings(decode, among_text=among_text) if has_json else None
        self.has_loop = False

    @property
    def must_end(self) -> bool:
        """Whether an answer without a grammar must end now, because it repeats itself."""
        return self.has_loop and self._text is not None

    def push(self, token: int) -> None:
        if self._text is not None:
            self.has_loop |= bool(self._text.push(token))
        if self._strings is not None:
            self._strings.push(token)
            self.has_loop = self._strings.has_loop


def holds_json(grammar: Grammar | None) -> bool:
    if grammar is not None and grammar.kind == "grammar":
        return "%json" in grammar.text
    return grammar is not None and grammar.kind in ("json", "json_object", "structural_tag")


def has_text(grammar: Grammar | None) -> bool:
    """Whether a grammar's answers may contain text outside JSON."""
    return grammar is None or grammar.kind not in ("json", "json_object")
