"""Loops: when an answer counts as repeating itself, and how it ends then.

A small model that always takes the likeliest token may write the same words until its limit. The
rule, which holds in block and full mode, in batches and in streams:

An answer repeats itself when its last tokens are one unit of at most ``LONGEST_UNIT`` tokens, again
and again: ``TEXT_COPIES`` times or more over ``TEXT_TOKENS`` of free text, or ``STRING_COPIES``
times or more over ``STRING_TOKENS`` of one JSON string. A unit without a letter never counts:
numbers, rules, blanks, empty cells. A unit with a letter always does: equal table rows and equal
lines of code, too.

- Free text ends there.
- In an answer with a grammar, a JSON string that repeats itself must end: from there on, the
  grammar allows tokens that close the string alone, as soon as its schema allows one. A later
  string of the answer must end sooner: once its last ``LATER_TOKENS`` tokens continue the loop.
- Text around JSON, as a structural tag or a grammar with ``%json`` may allow, is free text: the
  grammar allows the answer's end alone, as soon as it allows it at all. JSON begins there at ``{``
  or ``[`` and ends with the bracket that closes it, or at a character that JSON cannot have there.
  A string that no bracket surrounds is text.
- Everything else is left to the grammar.

``finish_reason`` is ``"repetition"`` in both cases, unless the answer is cut later. Text that was
written stays.

The guard is on where the likeliest tokens are chosen: without a temperature, without beams, and
without arguments of transformers' ``generate``. ``do_sample=False``, given explicitly, is such an
argument, and switches the guard off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.output.grammar import Grammar

TEXT_TOKENS = 128
"""Tokens of free text that one unit must fill."""

STRING_TOKENS = 64
"""Tokens of a JSON string that one unit must fill. Fewer than in free text, because the rest of the
object must fit in the answer, too."""

TEXT_COPIES = 3
"""Times that a unit must come in a row in free text, where a refrain may come twice."""

STRING_COPIES = 2
"""Times that a unit must come in a row in a JSON string."""

LATER_TOKENS = 16
"""Tokens of a loop at which a later JSON string ends. Enough that a common phrase is no loop."""

LONGEST_UNIT = 128
"""Tokens of the longest unit that is recognised."""

_OUTSIDE_STRINGS = frozenset('{}[]:,"+-.0123456789Eetruefalsn \t\r\n')
"""Characters of JSON that is not in a string: marks, numbers, ``true``, ``false`` and ``null``."""

_PERIODS = np.arange(1, LONGEST_UNIT + 1)

Decode = Callable[[Sequence[int]], str]
"""Text of some tokens."""


class Repetition:
    """Finds a unit that fills the end of a text; looks at ``LONGEST_UNIT`` tokens for each new one.

    Args:
        decode: Text of some tokens.
        least_tokens: Tokens that the unit must fill.
        copies: Times that the unit must come in a row.
    """

    def __init__(self, decode: Decode, least_tokens: int, copies: int) -> None:
        self._decode = decode
        self._needed = np.maximum(_PERIODS * copies, least_tokens)
        self._recent = np.full(LONGEST_UNIT, -1)  # the latest token first
        self._equal = np.zeros(LONGEST_UNIT, int)  # tokens that equal the one a period before

    def push(self, token: int) -> tuple[int, ...]:
        """Take the next token; return the unit that fills the text's end, or nothing."""
        self._equal = (self._equal + 1) * (self._recent == token)
        self._recent = np.roll(self._recent, 1)
        self._recent[0] = token
        found = np.flatnonzero(self._equal + _PERIODS >= self._needed)
        if not found.size:
            return ()
        unit = tuple(self._recent[found[0] :: -1].tolist())
        return unit if any(map(str.isalpha, self._decode(unit))) else ()


class JsonStrings:
    """Follows the strings of an answer that is, or holds, JSON, and the text around it.

    Args:
        decode: Text of some tokens.
        among_text: Whether text may surround the JSON.

    Attributes:
        has_loop: Whether a string of the answer, or text around JSON, has repeated itself.
    """

    def __init__(self, decode: Decode, *, among_text: bool = False) -> None:
        self._decode = decode
        self._among_text = among_text
        self._begin()

    def _begin(self) -> None:
        self.has_loop = False
        self._ids: list[int] = []
        self._depth = 0  # brackets that are open
        self._is_open = self._is_escaped = False
        self._loops: set[tuple[int, ...]] = set()  # every run of LATER_TOKENS tokens of a loop
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
        """Whether a string that repeats itself is open, and a quote would close it."""
        return self._repeats and not self._is_escaped

    @property
    def text_must_end(self) -> bool:
        """Whether the answer is in text around JSON, and the text repeats itself."""
        return self._text_repeats and self._depth == 0

    def follow(self, ids: Sequence[int]) -> None:
        """Take the answer so far, which need not begin with that of the previous call."""
        if self._ids != ids[: len(self._ids)]:
            self._begin()
        for token in ids[len(self._ids) :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Take the next token."""
        self._ids.append(token)
        borders = [self._reads_border(character) for character in self._decode([token])]
        if any(borders):
            self._begin_string()
        elif self._is_open:
            self._take(token)
        if self._among_text:
            self._take_text(token)

    def _reads_border(self, character: str) -> bool:
        """Take a character; return whether a string begins or ends with it."""
        was_open = self._is_open
        if self._among_text and not was_open:
            self._note_depth(character)
        is_json = self._depth > 0 or not self._among_text
        if was_open and self._among_text and character == "\n":  # JSON has none in a string
            self._depth, self._is_open = 0, False
        elif is_json and character == '"' and not self._is_escaped:
            self._is_open = not was_open
        self._is_escaped = self._is_open and character == "\\" and not self._is_escaped
        return self._is_open != was_open

    def _note_depth(self, character: str) -> None:
        """Take a character that is in no string."""
        was_json = self._depth > 0
        self._depth += (character in "{[") - (was_json and character in "}]")
        if was_json and self._depth == 0 and self._has_data:
            self._begin_text()
        elif character not in _OUTSIDE_STRINGS:
            self._depth = 0
        # "[1]" is a citation, and the text goes on behind it.
        inside = was_json and (character == '"' or character.isalpha())
        self._has_data = self._depth > 0 and (self._has_data or inside)

    def _take(self, token: int) -> None:
        """Take a token within a string."""
        self._string.append(token)
        if unit := self._repetition.push(token):
            loop = unit * (2 + LATER_TOKENS // len(unit))
            self._loops |= {loop[at : at + LATER_TOKENS] for at in range(len(unit))}
            self._repeats = True
        self._repeats |= tuple(self._string[-LATER_TOKENS:]) in self._loops
        self.has_loop |= self._repeats

    def _take_text(self, token: int) -> None:
        """Take a token of text, or of JSON, whose brackets and numbers may belong to the text."""
        found = bool(self._text.push(token))
        self._text_repeats |= found and self._depth == 0
        self.has_loop |= self._text_repeats


class Matching(Protocol):
    """What holds one answer to a grammar; see ``blockattn_rag.output.compiler.Matcher``."""

    def fresh(self) -> Matching: ...

    def follow(self, ids: Sequence[int]) -> bool: ...

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]: ...


class LoopEndingMatcher:
    """A matcher that allows nothing but the end of a JSON string, or text, that repeats itself.

    Args:
        matcher: Matcher of the grammar.
        decode: Text of some tokens.
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
    """Guards one answer as its tokens come.

    Args:
        decode: Text of some tokens.
        grammar: Grammar of the answer.

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
        """Whether the answer ends here, because its text repeats itself."""
        return self.has_loop and self._text is not None

    def push(self, token: int) -> None:
        """Take the next token."""
        if self._text is not None:
            self.has_loop |= bool(self._text.push(token))
        if self._strings is not None:
            self._strings.push(token)
            self.has_loop = self._strings.has_loop


def holds_json(grammar: Grammar | None) -> bool:
    """Whether answers of a grammar are, or hold, JSON."""
    if grammar is None:
        return False
    if grammar.kind == "grammar":
        return "%json" in grammar.text
    return grammar.kind in ("json", "json_object", "structural_tag")


def has_text(grammar: Grammar | None) -> bool:
    """Whether answers of a grammar may have text around JSON."""
    return grammar is None or grammar.kind not in ("json", "json_object")
