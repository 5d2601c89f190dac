"""Loops: when an answer counts as repeating itself, and how it ends then.

A small model that always takes the likeliest token may write the same words until its limit. The
rule, which holds in block and full mode, in batches and in streams:

An answer repeats itself when its last tokens are one unit of at most ``LONGEST_UNIT`` tokens, again
and again: ``COPIES`` times or more, and over ``TEXT_TOKENS`` of free text or ``STRING_TOKENS`` of
one JSON string. A unit without a letter never counts: numbers, lines of tables, blanks.

- Free text ends there.
- In an answer with a grammar, a JSON string that repeats itself must end: from there on, the
  grammar allows tokens that close the string alone, as soon as its schema allows one. A later
  string of the answer must end once it has the same unit. Everything else is left to the grammar.

``finish_reason`` is ``"repetition"`` in both cases, unless the answer is cut later. Text that was
written stays.

The guard is on where the likeliest tokens are chosen: without a temperature, without beams, and
without arguments of transformers' ``generate``. ``do_sample=False``, given explicitly, is such an
argument, and switches the guard off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.structured.grammar import Grammar

TEXT_TOKENS = 128
"""Tokens of free text that one unit must fill."""

STRING_TOKENS = 64
"""Tokens of a JSON string that one unit must fill. Fewer than in free text, because the rest of the
object must fit in the answer, too."""

COPIES = 3
"""Times that a unit must come in a row."""

LONGEST_UNIT = 128
"""Tokens of the longest unit that is recognised."""

_PERIODS = np.arange(1, LONGEST_UNIT + 1)

Decode = Callable[[Sequence[int]], str]
"""Text of some tokens."""


class Repetition:
    """Finds a unit that fills the end of a text; looks at ``LONGEST_UNIT`` tokens for each new one.

    Args:
        decode: Text of some tokens.
        least_tokens: Tokens that the unit must fill.
    """

    def __init__(self, decode: Decode, least_tokens: int) -> None:
        self._decode = decode
        self._needed = np.maximum(_PERIODS * COPIES, least_tokens)
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
    """Follows the strings of an answer that is, or holds, JSON.

    Args:
        decode: Text of some tokens.

    Attributes:
        has_loop: Whether a string of the answer has repeated itself.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._begin()

    def _begin(self) -> None:
        self.has_loop = False
        self._ids: list[int] = []
        self._is_open = self._is_escaped = False
        self._units: set[tuple[int, ...]] = set()
        self._begin_string()

    def _begin_string(self) -> None:
        self._repetition = Repetition(self._decode, STRING_TOKENS)
        self._recent: deque[int] = deque(maxlen=LONGEST_UNIT)
        self._repeats = False

    @property
    def must_end(self) -> bool:
        """Whether a string that repeats itself is open, and a quote would close it."""
        return self._repeats and not self._is_escaped

    def follow(self, ids: Sequence[int]) -> None:
        """Take the answer so far, which need not begin with that of the previous call."""
        if self._ids != ids[: len(self._ids)]:
            self._begin()
        for token in ids[len(self._ids) :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Take the next token."""
        self._ids.append(token)
        has_quote = False
        for character in self._decode([token]):
            if not self._is_escaped and character == '"':
                self._is_open, has_quote = not self._is_open, True
            self._is_escaped = self._is_open and character == "\\" and not self._is_escaped
        if has_quote:
            self._begin_string()
        elif self._is_open:
            self._take(token)

    def _take(self, token: int) -> None:
        """Take a token within a string."""
        self._recent.append(token)
        if unit := self._repetition.push(token):
            self._units |= {unit[at:] + unit[:at] for at in range(len(unit))}
        recent = tuple(self._recent)
        known = {len(one) for one in self._units}
        self._repeats |= any(recent[-size:] in self._units for size in known)
        self.has_loop |= self._repeats


class Matching(Protocol):
    """What holds one answer to a grammar; see ``structured.compiler.Matcher``."""

    def fresh(self) -> Matching: ...

    def follow(self, ids: Sequence[int]) -> bool: ...

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]: ...


class StringEndingMatcher:
    """A matcher that allows nothing but the end of a JSON string that repeats itself.

    Args:
        matcher: Matcher of the grammar.
        decode: Text of some tokens.
        quotes: Tokens that begin with a quotation mark.
    """

    def __init__(self, matcher: Matching, decode: Decode, quotes: NDArray[np.int_]) -> None:
        self._matcher = matcher
        self._decode = decode
        self._quotes = quotes
        self._strings = JsonStrings(decode)

    def fresh(self) -> StringEndingMatcher:
        return StringEndingMatcher(self._matcher.fresh(), self._decode, self._quotes)

    def follow(self, ids: Sequence[int]) -> bool:
        self._strings.follow(ids)
        return self._matcher.follow(ids)

    def allowed(self, vocabulary: int, ends: Collection[int]) -> NDArray[np.bool_]:
        allowed = self._matcher.allowed(vocabulary, ends)
        if not self._strings.must_end:
            return allowed
        quotes = self._quotes[self._quotes < vocabulary]
        closing = np.zeros_like(allowed)
        closing[quotes] = allowed[quotes]
        return closing if closing.any() else allowed


class LoopGuard:
    """Guards one answer as its tokens come.

    Args:
        decode: Text of some tokens.
        grammar: Grammar of the answer.

    Attributes:
        has_loop: Whether the answer has repeated itself.
    """

    def __init__(self, decode: Decode, grammar: Grammar | None) -> None:
        self._text = Repetition(decode, TEXT_TOKENS) if grammar is None else None
        self._strings = JsonStrings(decode) if holds_json(grammar) else None
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


class Loops:
    """Makes the guards of answers of one model.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def guard(self, grammar: Grammar | None) -> LoopGuard:
        """Guard of one answer."""
        return LoopGuard(self._decode, grammar)

    def ending_strings(self, matcher: Matching, grammar: Grammar | None) -> Matching:
        """The matcher of a grammar; strings of JSON that repeat themselves end."""
        if not holds_json(grammar):
            return matcher
        return StringEndingMatcher(matcher, self._decode, self._quotes)

    @cached_property
    def _quotes(self) -> NDArray[np.int_]:
        """Tokens that begin with a quotation mark."""
        texts = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        return np.array([number for number, text in enumerate(texts) if str(text)[:1] == '"'], int)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)
