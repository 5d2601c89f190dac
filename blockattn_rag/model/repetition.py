"""Loop detection: ends answers that repeat themselves.

With greedy decoding, a small model may repeat the same words until the token limit. The following
rule applies in block and full mode, in batches and in streams.

An answer repeats itself when it ends with consecutive copies of one unit of at most
``LONGEST_UNIT`` tokens: at least ``TEXT_COPIES`` copies that fill ``TEXT_TOKENS`` tokens of free
text, or at least ``STRING_COPIES`` copies that fill ``STRING_TOKENS`` tokens of one JSON string.
The unit must contain a letter. Repeated numbers, horizontal rules, blanks and empty cells are
therefore ignored, while equal table rows and equal lines of code count.

- Free text ends at the repetition.
- With a grammar, a JSON string that repeats itself must end: only tokens that close the string are
  allowed, as soon as its schema allows one. Later strings of the answer end sooner, once their last
  ``LATER_TOKENS`` tokens continue the same loop.
- Text around JSON, allowed by structural tags and by grammars with ``%json``, counts as free text:
  only the end of the answer is allowed, as soon as the grammar allows it. In such text, JSON begins
  at ``{`` or ``[``. It ends at the matching bracket, or at a character that is invalid in JSON. A
  string outside brackets is text.
- Everything else is left to the grammar.

``finish_reason`` is ``"repetition"`` in all cases, unless the answer is cut off later. The repeated
text stays in the answer.

The guard is active only for greedy decoding without beams and without further arguments of
transformers' ``generate``. An explicit ``do_sample=False`` is such an argument, and disables it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.output.grammar import Grammar

TEXT_TOKENS = 128
"""Tokens of free text that the copies of one unit must fill."""

STRING_TOKENS = 64
"""Tokens of a JSON string that the copies of one unit must fill. Fewer than in free text, so that
the rest of the object still fits in the answer."""

TEXT_COPIES = 3
"""Consecutive copies that count as a loop in free text, in which a refrain may occur twice."""

STRING_COPIES = 2
"""Consecutive copies that count as a loop in a JSON string."""

LATER_TOKENS = 16
"""Tokens of a known loop that end a later JSON string. More than a common phrase has."""

LONGEST_UNIT = 128
"""Maximum length of a unit in tokens."""

_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789Eetruefalsn \t\r\n')
"""Characters of JSON outside strings: punctuation, numbers, ``true``, ``false`` and ``null``."""

_PERIODS = np.arange(1, LONGEST_UNIT + 1)

Decode = Callable[[Sequence[int]], str]
"""Function that decodes token ids to text."""


class Repetition:
    """Detects a unit that is repeated at the end of a text.

    Compares each new token with the last ``LONGEST_UNIT`` tokens.

    Args:
        least_tokens: Minimum number of tokens that the copies must fill.
        copies: Minimum number of consecutive copies.
    """

    def __init__(self, decode: Decode, least_tokens: int, copies: int) -> None:
        self._decode = decode
        self._needed = np.maximum(_PERIODS * copies, least_tokens)
        self._recent = np.full(LONGEST_UNIT, -1)  # newest token first
        self._equal = np.zeros(LONGEST_UNIT, int)  # per period: length of the match

    def push(self, token: int) -> tuple[int, ...]:
        """Add a token. Return the unit that is repeated at the end of the text, or ``()``."""
        self._equal = (self._equal + 1) * (self._recent == token)
        self._recent = np.roll(self._recent, 1)
        self._recent[0] = token
        found = np.flatnonzero(self._equal + _PERIODS >= self._needed)
        if not found.size:
            return ()
        unit = tuple(self._recent[found[0] :: -1].tolist())
        return unit if any(map(str.isalpha, self._decode(unit))) else ()


class JsonStrings:
    """Tracks the JSON strings of an answer, and the text around the JSON.

    Args:
        among_text: Whether text may surround the JSON.

    Attributes:
        has_loop: Whether a string, or the text around the JSON, has repeated itself.
    """

    def __init__(self, decode: Decode, *, among_text: bool = False) -> None:
        self._decode = decode
        self._among_text = among_text
        self._begin()

    def _begin(self) -> None:
        self.has_loop = False
        self._ids: list[int] = []
        self._depth = 0  # number of open brackets
        self._is_open = self._is_escaped = False
        self._loops: set[tuple[int, ...]] = set()  # all runs of LATER_TOKENS tokens in known loops
        self._begin_string()
        self._begin_text()

    def _begin_string(self) -> None:
        self._repetition = Repetition(self._decode, STRING_TOKENS, STRING_COPIES)
        self._string: list[int] = []
        self._repeats = False

    def _begin_text(self) -> None:
        self._text = Repetition(self._decode, TEXT_TOKENS, TEXT_COPIES)
        self._text_repeats = self._has_data = False

    @property
    def must_end(self) -> bool:
        """Whether the open string repeats itself, and a quote would close it."""
        return self._repeats and not self._is_escaped

    @property
    def text_must_end(self) -> bool:
        """Whether the answer ends in text around JSON that repeats itself."""
        return self._text_repeats and self._depth == 0

    def follow(self, ids: Sequence[int]) -> None:
        """Process the answer so far. It need not continue the answer of the previous call."""
        if self._ids != ids[: len(self._ids)]:
            self._begin()
        for token in ids[len(self._ids) :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Process the next token."""
        self._ids.append(token)
        borders = [self._reads_border(character) for character in self._decode([token])]
        if any(borders):
            self._begin_string()
        elif self._is_open:
            self._take(token)
        if self._among_text:
            self._take_text(token)

    def _reads_border(self, character: str) -> bool:
        """Process a character, and return whether it opens or closes a string."""
        was_open = self._is_open
        if self._among_text and not was_open:
            self._note_depth(character)
        is_json = self._depth > 0 or not self._among_text
        if was_open and self._among_text and character == "\n":  # invalid in a JSON string
            self._depth, self._is_open = 0, False
        elif is_json and character == '"' and not self._is_escaped:
            self._is_open = not was_open
        self._is_escaped = self._is_open and character == "\\" and not self._is_escaped
        return self._is_open != was_open

    def _note_depth(self, character: str) -> None:
        """Process a character outside strings."""
        was_json = self._depth > 0
        self._depth += (character in "{[") - (was_json and character in "}]")
        if was_json and self._depth == 0 and self._has_data:
            self._begin_text()
        elif character not in _OUTSIDE_STRINGS:
            self._depth = 0
        # A bare "[1]" is a citation, after which the text continues.
        inside = was_json and (character == '"' or character.isalpha())
        self._has_data = self._depth > 0 and (self._has_data or inside)

    def _take(self, token: int) -> None:
        """Process a token inside a string."""
        self._string.append(token)
        if unit := self._repetition.push(token):
            loop = unit * (2 + LATER_TOKENS // len(unit))
            self._loops |= {loop[at : at + LATER_TOKENS] for at in range(len(unit))}
            self._repeats = True
        self._repeats |= tuple(self._string[-LATER_TOKENS:]) in self._loops
        self.has_loop |= self._repeats

    def _take_text(self, token: int) -> None:
        """Process any token, because brackets and numbers may belong to the text."""
        found = bool(self._text.push(token))
        self._text_repeats |= found and self._depth == 0
        self.has_loop |= self._text_repeats


class Matching(Protocol):
    """Matches one answer against a grammar; see ``blockattn_rag.output.compiler.Matcher``."""

    def fresh(self) -> Matching: ...

    def follow(self, ids: Sequence[int]) -> bool: ...

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]: ...


class LoopEndingMatcher:
    """Matcher that ends JSON strings and text that repeat themselves.

    Args:
        quotes: Tokens that begin with a quotation mark.
        among_text: Whether text may surround the JSON.
    """

    def __init__(
        self,
        matcher: Matching,
        decode: Decode,
        quotes: NDArray[np.int_],
        *,
        among_text: bool = False,
    ) -> None:
        self._matcher = matcher
        self._decode = decode
        self._quotes = quotes
        self._among_text = among_text
        self._strings = JsonStrings(decode, among_text=among_text)

    def fresh(self) -> LoopEndingMatcher:
        return LoopEndingMatcher(
            self._matcher.fresh(), self._decode, self._quotes, among_text=self._among_text
        )

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
    """Detects loops in one answer, token by token.

    Args:
        grammar: Grammar of the answer. None: the answer is free text.

    Attributes:
        has_loop: Whether the answer has repeated itself.
    """

    def __init__(self, decode: Decode, grammar: Grammar | None) -> None:
        self._text = Repetition(decode, TEXT_TOKENS, TEXT_COPIES) if grammar is None else None
        self._strings = None
        if holds_json(grammar):
            self._strings = JsonStrings(decode, among_text=has_text(grammar))
        self.has_loop = False

    @property
    def must_end(self) -> bool:
        """Whether the answer must end now, because its text repeats itself."""
        return self.has_loop and self._text is not None

    def push(self, token: int) -> None:
        """Process the next token."""
        if self._text is not None:
            self.has_loop |= bool(self._text.push(token))
        if self._strings is not None:
            self._strings.push(token)
            self.has_loop = self._strings.has_loop


def holds_json(grammar: Grammar | None) -> bool:
    """Whether the answers of a grammar are or contain JSON."""
    if grammar is None:
        return False
    if grammar.kind == "grammar":
        return "%json" in grammar.text
    return grammar.kind in ("json", "json_object", "structural_tag")


def has_text(grammar: Grammar | None) -> bool:
    """Whether the answers of a grammar may contain text outside JSON."""
    return grammar is None or grammar.kind not in ("json", "json_object")
