"""Answers as text and calls of tools, read as they come."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from blockattn_rag.tools.calls import InvalidToolCall, ToolCall, new_call_id
from blockattn_rag.tools.formats import ToolFormat
from blockattn_rag.tools.open_call import BareCall, OpenCall

Piece = str | ToolCall | InvalidToolCall
"""A piece of an answer: text, a call, or what was written as a call and is none."""


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


def parse_answer(answer: str, form: ToolFormat, names: Collection[str] = ()) -> ReadAnswer:
    """A whole answer; see ``ToolCallParser``."""
    parser = ToolCallParser(form, names)
    return ReadAnswer.of([*parser.push(answer), *parser.finish()])


class ToolCallParser:
    """Reads an answer piece by piece. Text comes out as it comes, a call when it is whole.

    White space beside a call belongs to neither text nor call. A malformed call is reported, never
    mended; what stands before and after it is read all the same.

    Args:
        form: how the model writes calls.
        names: of the tools that it was given. An object at the beginning of an answer that is no
            call, and was not opened as one, is a malformed call only if it has one of these names.
    """

    def __init__(self, form: ToolFormat, names: Collection[str] = ()) -> None:
        self._form = form
        self._names = frozenset(names)
        self._rest = ""  # what came and was not read
        self._begins = True  # the answer has no visible character so far
        self._follows_call = False  # only white space has come since a call
        self._blank = ""  # white space between text and the call after it
        self._open: OpenCall | None = None
        self._ids: set[str] = set()  # of the calls so far

    def push(self, text: str) -> list[Piece]:
        """Take the next piece of the answer; give what has become certain, maybe nothing."""
        self._rest += text
        return [*self._pieces(final=False)]

    def finish(self) -> list[Piece]:
        """The rest, when no more comes."""
        return [*self._pieces(final=True)]

    def _pieces(self, *, final: bool) -> Iterator[Piece]:
        while (found := (self._call if self._open else self._text)(final)) is not None:
            yield from found

    def _text(self, final: bool) -> list[Piece] | None:
        """Text up to the next call; None if there is none for now."""
        if (self._begins or self._follows_call) and self._form.is_bare:
            visible = self._rest.lstrip()
            if self._follows_call:  # more calls may follow without an opening
                visible = visible.removeprefix(";").lstrip()
            if visible.startswith("{"):
                blank = self._rest[: len(self._rest) - len(visible)]
                self._rest, self._open = visible, BareCall(self._form, self._names, blank)
                return []
            if not (visible or final):
                return None
        before, opening, after = self._rest.partition(self._form.opening)
        if opening:
            text, self._rest, self._open = before, after, OpenCall(self._form)
        else:
            end = len(self._rest) - (0 if final else _held(self._rest, self._form.opening))
            text, self._rest = self._rest[:end], self._rest[end:]
        return self._given(text, before_call=bool(opening)) or ([] if opening else None)

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
        return [shown] if shown else []

    def _call(self, final: bool) -> list[Piece] | None:
        """The calls after the opening; None if they have not ended."""
        assert self._open is not None
        if (read := self._open.read(self._rest, final)) is None:
            return None
        calls, text, self._rest = read
        self._open, self._begins, self._follows_call = None, False, not text
        return [text] if text else [self._with_own_id(one) for one in calls]

    def _with_own_id(self, call: ToolCall | InvalidToolCall) -> ToolCall | InvalidToolCall:
        """A call whose id no other call of the answer has, because results are told apart by it."""
        if call.id in self._ids:
            call = replace(call, id=new_call_id())
        self._ids.add(call.id)
        return call


def _held(text: str, opening: str) -> int:
    """Characters at the end of a text that may belong to an opening, or are white space."""
    sizes = (size for size in range(len(opening) - 1, 0, -1) if text.endswith(opening[:size]))
    size = next(sizes, 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())
