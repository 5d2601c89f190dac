"""Answers as text and calls of tools, read as they come."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from blockattn_rag.output.marks import Marks, PrivateMarks
from blockattn_rag.output.open_call import BareCall, OpenCall
from blockattn_rag.output.tool_calls import InvalidToolCall, ToolCall, new_call_id
from blockattn_rag.output.tool_formats import ToolFormat

Piece = str | ToolCall | InvalidToolCall
"""A piece of an answer: text, a call, or what was written as a call and is none."""

_BLANKS = re.compile(r"\s*")


class ReadAnswer(NamedTuple):
    """An answer as text and calls."""

    text: str
    calls: list[ToolCall]
    invalid: list[InvalidToolCall]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> ReadAnswer:
        """The pieces of an answer, sorted."""
        return cls(
            "".join(piece for piece in pieces if isinstance(piece, str)),
            [piece for piece in pieces if isinstance(piece, ToolCall)],
            [piece for piece in pieces if isinstance(piece, InvalidToolCall)],
        )


def parse_answer(
    answer: str,
    form: ToolFormat,
    names: Collection[str] = (),
    *,
    tokens: Collection[str] = (),
    marks: Marks = (),
) -> ReadAnswer:
    """A whole answer; see ``ToolCallParser``."""
    parser = ToolCallParser(form, names, tokens)
    return ReadAnswer.of([*parser.push(answer, marks), *parser.finish()])


class ToolCallParser:
    """Reads an answer piece by piece. Text comes out as it comes, a call when it is whole.

    White space beside a call belongs to neither text nor call. A malformed call is reported, never
    mended; what stands before and after it is read all the same. Each character is looked at once.

    Args:
        form: how the model writes calls.
        names: of the tools that it was given. An object at the beginning of an answer that is no
            call, and was not opened as one, is a malformed call only if it has one of these names.
        tokens: marks of the format that the tokenizer has as one token each (``mark_ids``). They
            count where ``push`` reports the token; the same characters elsewhere are text.
        only_first: whether an answer that does not begin with a call is all text, because a grammar
            chose between calls and text.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str] = (),
        tokens: Collection[str] = (),
        *,
        only_first: bool = False,
    ) -> None:
        self._marks = PrivateMarks(form, tokens)
        self._form = self._marks.form
        self._names = frozenset(names)
        self._only_first = only_first
        self._is_text = False  # no call can come any more
        self._rest = ""  # what came and was not read
        self._blanks = 0  # characters at the beginning of the rest that are known to be white space
        self._begins = True  # the answer has no visible character so far
        self._follows_call = False  # only white space has come since a call
        self._blank = ""  # white space between text and the call after it
        self._open: OpenCall | None = None
        self._ids: set[str] = set()  # of the calls so far

    @property
    def has_loop(self) -> bool:
        """Whether a list of calls that is still open has the same call twice in a row."""
        return self._open is not None and self._open.has_loop

    def push(self, text: str, marks: Marks = ()) -> list[Piece]:
        """Take the next piece of the answer; give what has become certain, maybe nothing.

        Args:
            text: the piece.
            marks: where control tokens are in it, as ``GenerationChunk`` has them.
        """
        # CPython appends in place to a local string that nothing else refers to.
        rest, self._rest = self._rest, ""
        rest += self._marks.private(text, marks)
        return self._read(rest, final=False)

    def finish(self) -> list[Piece]:
        """The rest, when no more comes."""
        return self._read(self._rest, final=True)

    def _read(self, rest: str, *, final: bool) -> list[Piece]:
        pieces: list[Piece] = []
        at = 0
        while True:
            before = at, self._open
            found, at = (self._call if self._open else self._text)(rest, at, final)
            pieces += found
            if before == (at, self._open):
                break
        self._rest = rest[at:] if at else rest
        return pieces

    def _text(self, rest: str, at: int, final: bool) -> tuple[list[Piece], int]:
        """Text from an index up to the next call, and where what was not read begins."""
        if self._is_text:
            return [self._marks.plain(rest[at:])] if at < len(rest) else [], len(rest)
        begin = _visible_from(rest, at + self._blanks)
        if begin == len(rest) and not final:
            self._blanks = begin - at
            return [], at
        self._blanks = 0
        if (self._begins or self._follows_call) and self._form.is_bare:
            bare = begin
            if self._follows_call and rest.startswith(";", begin):  # more may follow unopened
                bare = _visible_from(rest, begin + 1)
            if rest.startswith("{", bare):
                self._open = BareCall(self._marks, self._names, rest[at:bare])
                return [], bare
            if bare == len(rest) and not final:
                return [], at
        opening = self._form.opening
        found = rest.find(opening, begin)
        if self._only_first and self._begins and begin < len(rest) and found != begin:
            if not final and opening.startswith(rest[begin : begin + len(opening)]):
                return [], at
            self._is_text = True
            return self._text(rest, at, final)
        if found >= 0:
            self._open = OpenCall(self._marks)
            return self._given(rest[at:found], before_call=True), found + len(opening)
        end = len(rest) - (0 if final else _held(rest[begin:], opening))
        if end == begin and not final:  # the white space may stand before an opening
            return [], at
        return self._given(rest[at:end], before_call=False), end

    def _given(self, text: str, *, before_call: bool) -> list[Piece]:
        """Text without the white space beside calls, unless more text comes after these."""
        shown = text.rstrip() if before_call else text
        if self._follows_call and (shown := shown.lstrip()):
            shown = self._blank + shown
        if shown:
            self._begins = self._begins and shown.isspace()
            self._follows_call = False
        if before_call and not (self._begins or self._follows_call):
            self._blank = text[len(text.rstrip()) :]
        return [self._marks.plain(shown)] if shown else []

    def _call(self, rest: str, at: int, final: bool) -> tuple[list[Piece], int]:
        """The calls behind an opening, and where what was not read begins."""
        assert self._open is not None
        if (read := self._open.read(rest, at, final)) is None:
            return [], at
        calls, text, end = read
        self._open, self._begins, self._follows_call = None, False, not text
        if text:
            self._is_text = self._only_first
            return [self._marks.plain(text)], end
        return [self._with_own_id(one) for one in calls], end

    def _with_own_id(self, call: ToolCall | InvalidToolCall) -> ToolCall | InvalidToolCall:
        """A call whose id no other call of the answer has, because results are told apart by it."""
        if call.id in self._ids:
            call = replace(call, id=new_call_id())
        self._ids.add(call.id)
        return call


def _visible_from(text: str, at: int) -> int:
    """Index of the first character from there on that is no white space."""
    blanks = _BLANKS.match(text, at)
    return blanks.end() if blanks else at


def _held(text: str, opening: str) -> int:
    """Characters at the end of a text that may belong to an opening, or are white space."""
    sizes = (size for size in range(len(opening) - 1, 0, -1) if text.endswith(opening[:size]))
    size = next(sizes, 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())
