"""Streaming parser that splits a model's answer into text and tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from blockattn_rag.output.tool_calls import (
    InvalidToolCall,
    ToolCall,
    new_call_id,
    read_call,
    strict_json,
)
from blockattn_rag.output.tool_formats import ToolFormat

Piece = str | ToolCall | InvalidToolCall
"""A piece of an answer: text, a call, or an invalid call."""

Marks = Sequence[tuple[int, int]]
"""Spans of control tokens in a text, each ``(start, end)``."""

# Marks are replaced by halves of surrogate pairs, which no tokenizer produces.
_OPENING, _CLOSING, _ARGUMENTS, _ID = _PRIVATE = "\udc00\udc01\udc02\udc03"
_ANY_PRIVATE = re.compile(f"[{_PRIVATE}]")

_VISIBLE = re.compile(r"\S")
_HEAD_END = re.compile(rf"[\[\]{{}}{_PRIVATE}]")
_STRUCTURE = re.compile(rf'[\[\]{{}}"\\\n{_CLOSING}]')
_NAME = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"\\]+)"')


class ReadAnswer(NamedTuple):
    """An answer split into text and calls."""

    text: str
    calls: list[ToolCall]
    invalid: list[InvalidToolCall]

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> ReadAnswer:
        """Collect the pieces of an answer."""
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
    """Parse a complete answer; see ``ToolCallParser``."""
    parser = ToolCallParser(form, names, tokens)
    return ReadAnswer.of([*parser.push(answer, marks), *parser.finish()])


class ToolCallParser:
    """Parses an answer in pieces. Returns text immediately, and each call when it is complete.

    White space next to a call is dropped. An invalid call is returned as such and never repaired;
    the rest of the answer is parsed as usual. Time is linear in the length of the answer.

    Args:
        form: How the model writes calls.
        names: Names of the tools. If an answer starts with a JSON object that has no opening mark
            and is not a valid call, it is an invalid call if it has one of these names, else text.
        tokens: Marks of the format that are one token each (``mark_ids``). They count only where
            the ``marks`` of ``push`` report the token; the same characters elsewhere are text.
        only_first: Whether an answer that does not start with a call is entirely text. True if a
            grammar decides between calls and text.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str] = (),
        tokens: Collection[str] = (),
        *,
        only_first: bool = False,
    ) -> None:
        self._form = form
        self._names = frozenset(names)
        self._only_first = only_first
        self._marks = _MarkReader(form, tokens)
        self._text = ""  # the answer, with private characters as marks
        self._at = 0  # start of the text that is not parsed yet
        self._blank_to = 0  # end of the known white space at `_at`
        self._call: _OpenCall | None = None
        self._is_text = False  # the rest of the answer has no calls
        self._begins = True  # nothing but white space so far
        self._follows_call = False  # only white space has come since a call
        self._blank = ""  # white space between text and the call after it
        self._ids: set[str] = set()

    @property
    def has_loop(self) -> bool:
        """Whether an unfinished list of calls has the same call twice in a row."""
        return self._call is not None and self._call.repeated is not None

    def push(self, text: str, marks: Marks = ()) -> list[Piece]:
        """Add the next piece of the answer. Returns newly parsed text and calls.

        Args:
            text: The piece.
            marks: Spans of control tokens in it, as in ``GenerationChunk``.
        """
        self._append(self._marks.read(text, marks))
        return [*self._pieces(final=False)]

    def finish(self) -> list[Piece]:
        """Parse the rest of the answer, which is complete."""
        self._append(self._marks.finish())
        return [*self._pieces(final=True)]

    def _append(self, text: str) -> None:
        # CPython appends in place to a string if a local variable has its only reference.
        whole, self._text = self._text, ""
        whole += text
        self._text = whole

    def _pieces(self, *, final: bool) -> Iterator[Piece]:
        while True:
            before = self._at, self._call
            yield from self._read_call(final) if self._call else self._read_text(final)
            if before == (self._at, self._call):
                return

    def _read_text(self, final: bool) -> Iterator[Piece]:
        """Read text up to the next call, and open that call."""
        text, at = self._text, self._at
        if self._is_text:
            self._at = len(text)
            yield from self._shown(text[at:])
            return
        begin = self._blank_to = _visible_from(text, max(at, self._blank_to))
        if begin == len(text) and not final:
            return
        if self._form.is_bare and (self._begins or self._follows_call):
            bare = begin
            if self._follows_call and text.startswith(";", begin):  # a call without mark
                bare = _visible_from(text, begin + 1)
            if text.startswith("{", bare):
                self._call = _OpenCall(self._form, bare, blank=text[at:bare])
                self._at = bare
                return
            if bare == len(text) and not final:
                return
        found = text.find(_OPENING, begin)
        if self._only_first and self._begins and begin < len(text) and found != begin:
            self._is_text = True
            yield from self._read_text(final)
        elif found >= 0:
            self._call = _OpenCall(self._form, found + 1)
            self._at = found + 1
            yield from self._beside_calls(text[at:found], before_call=True)
        else:
            part = text[at:] if final else text[at:].rstrip()
            self._at += len(part)
            yield from self._beside_calls(part, before_call=False)

    def _beside_calls(self, text: str, *, before_call: bool) -> Iterator[Piece]:
        """Text without white space next to calls. White space between two texts is kept."""
        shown = text.rstrip() if before_call else text
        if self._follows_call and (shown := shown.lstrip()):
            shown = self._blank + shown
        if shown:
            self._begins = self._begins and shown.isspace()
            self._follows_call = False
        if before_call and not (self._begins or self._follows_call):
            self._blank = text[len(text.rstrip()) :]
        yield from self._shown(shown)

    def _shown(self, text: str) -> Iterator[Piece]:
        if text:
            yield self._marks.plain(text)

    def _read_call(self, final: bool) -> Iterator[Piece]:
        """Read the open call, or list of calls, if it has ended."""
        assert self._call is not None
        call, text = self._call, self._text
        if (read := call.read(text, self._marks.plain, final=final)) is None:
            return
        calls, end = read
        self._call, self._at, self._begins = None, end, False
        is_ours = any(isinstance(one, ToolCall) or one.name in self._names for one in calls)
        if call.blank is not None and not is_ours:  # a JSON object that is not a call
            self._is_text, self._follows_call = self._only_first, False
            yield from self._shown(call.blank + text[call.start : end])
            return
        self._follows_call = True
        for one in calls:
            # Results refer to calls by id, so ids must be unique.
            yield replace(one, id=new_call_id()) if one.id in self._ids else one
            self._ids.add(one.id)


class _MarkReader:
    """Replaces the marks of a format with private characters.

    Args:
        form: How the model writes calls.
        tokens: Marks that are tokens. The others are recognized in text.
    """

    def __init__(self, form: ToolFormat, tokens: Collection[str]) -> None:
        marks = (form.opening, form.closing, form.arguments_mark, form.id_mark)
        private = {mark: one for mark, one in zip(marks, _PRIVATE, strict=True) if mark}
        self._plain = {ord(one): mark for mark, one in private.items()}
        self._tokens = {mark: one for mark, one in private.items() if mark in tokens}
        self._spelled = {mark: one for mark, one in private.items() if mark not in tokens}
        self._held = ""  # text that may be the start of a mark

    def read(self, text: str, marks: Marks) -> str:
        """The next piece with private characters as marks, up to a possible start of a mark."""
        parts, at = [], 0
        for start, end in marks:
            if one := self._tokens.get(text[start:end]):
                parts += [self._replaced(text[at:start]), self.finish(), one]
                at = end
        return "".join([*parts, self._replaced(text[at:])]) if parts else self._replaced(text)

    def finish(self) -> str:
        """Return the text that was held back."""
        text, self._held = self._held, ""
        return text

    def plain(self, text: str) -> str:
        """Replace private characters with their marks."""
        return text.translate(self._plain) if _ANY_PRIVATE.search(text) else text

    def _replaced(self, text: str) -> str:
        text = self.finish() + _ANY_PRIVATE.sub("\ufffd", text)
        for mark, one in self._spelled.items():
            text = text.replace(mark, one)
        longest = max(map(len, self._spelled), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            if any(len(mark) > size and text.endswith(mark[:size]) for mark in self._spelled):
                self._held = text[-size:]
                return text[:-size]
        return text


class _OpenCall:
    """A call, or list of calls, that may be incomplete.

    Args:
        form: How the model writes calls.
        start: Index after the opening mark.
        blank: Text before a JSON object without opening mark. None: there was an opening mark.

    Attributes:
        repeated: End of the first of two consecutive equal objects in a list. None: no such pair.
    """

    def __init__(self, form: ToolFormat, start: int, blank: str | None = None) -> None:
        self._form = form
        self.start = start
        self.blank = blank
        self.repeated: int | None = None
        self._at = start  # everything before this index was scanned
        # The head: everything before the JSON.
        self._begin = start if form.closing else None
        self._word = start  # start of a name or an id
        self._name: str | None = None
        self._call_id: str | None = None
        self._has_arguments = False
        self._is_invalid = False  # no JSON can follow
        # The JSON.
        self._depth = 0
        self._in_string = False
        self._is_broken = False  # after an unclosed string, quotes are ignored
        self._escaped = -1  # index of an escaped character
        self._is_list = False
        self._item = ""  # the latest object of the list
        self._item_start = self._item_end = 0

    def read(
        self, text: str, plain: Callable[[str], str], *, final: bool
    ) -> tuple[list[ToolCall | InvalidToolCall], int] | None:
        """Parse the calls that begin at ``self.start``.

        Args:
            text: The answer so far.
            plain: Function that replaces private characters with their marks.
            final: Whether the answer is complete.

        Returns:
            The calls and the index after them, or None if the calls may be incomplete.
        """
        self._find_json(text)
        if self._begin is None:
            end = text.find(_OPENING, self._at)
            if end < 0 and not final:
                self._at = len(text)
                return None
            end = len(text) if end < 0 else end
            found = plain(text[self.start : end]).strip()
            expected = "a tool's name and " if self._form.arguments_mark else ""
            return [InvalidToolCall(found, f"expected {expected}JSON, found {found[:40]!r}")], end
        found_end = self._json_end(text)
        if found_end is None and not final:
            return None
        end = len(text) if found_end is None else found_end
        body, is_cut = text[self._begin : end], found_end is None
        if is_cut and self.repeated is not None:
            body, is_cut = text[self._begin : self.repeated] + "]", False
        shown = plain(text[self.start : self._begin] + body).strip()
        after = end + 1 if self._form.closing and end < len(text) else end
        return self._calls(plain(body), shown, is_cut=is_cut), after

    def _find_json(self, text: str) -> None:
        """Find the start of the JSON, which some formats write after a name and an id."""
        while self._begin is None and not self._is_invalid:
            found = (_VISIBLE if self._has_arguments else _HEAD_END).search(text, self._at)
            self._at = found.start() if found else len(text)
            if found is None:
                return
            mark, word = found[0], text[self._word : self._at].strip()
            is_bare = self._name is None and not word and mark in "[{"
            if is_bare or (self._has_arguments and mark != _OPENING):
                self._begin = self._at
            elif word and (mark == _ARGUMENTS or (mark == _ID and self._name is None)):
                self._call_id = word if self._name else None
                self._name = self._name or word
                self._has_arguments = mark == _ARGUMENTS
                self._at = self._word = self._at + 1
            else:
                self._is_invalid = True

    def _json_end(self, text: str) -> int | None:
        """End of the JSON: index of the closing mark outside strings, or after the last bracket."""
        assert self._begin is not None
        for found in _STRUCTURE.finditer(text, max(self._at, self._begin)):
            at, one = found.start(), found[0]
            if self._in_string:
                if one == "\n":  # JSON strings have no line breaks: unclosed
                    self._in_string, self._is_broken = False, True
                elif one == "\\" and at != self._escaped:
                    self._escaped = at + 1
                elif one == '"' and at != self._escaped:
                    self._in_string = False
            elif one == '"':
                self._in_string = not self._is_broken
            elif one == _CLOSING:
                return at
            elif one in "[{":
                self._depth += 1
                if self._depth == 1:
                    self._is_list = one == "["
                elif self._depth == 2:
                    self._item_start = at
            elif one in "]}":
                self._depth -= 1
                if self._depth <= 0 and not self._form.closing:
                    return at + 1
                if self._depth == 1 and self._is_list:
                    self._note_item(text[self._item_start : at + 1], at + 1)
        self._at = len(text)
        return None

    def _note_item(self, item: str, end: int) -> None:
        if item == self._item and self.repeated is None:
            self.repeated = self._item_end
        self._item, self._item_end = item, end

    def _calls(self, body: str, shown: str, *, is_cut: bool) -> list[ToolCall | InvalidToolCall]:
        name, keys = self._name, self._form.argument_keys
        try:
            value: Any = strict_json(body)
        except (ValueError, RecursionError) as error:
            if name is None and (found := _NAME.match(body)):
                name = found[1]
            why = "the answer ends before the call does" if is_cut else str(error)
            return [InvalidToolCall(shown, why, name)]
        if name is not None:
            value = {"name": name, keys[0]: value, "id": self._call_id or new_call_id()}
        if not isinstance(value, list) or len(value) < 2:
            only = value[0] if isinstance(value, list) and value else value
            return [read_call(only, shown, keys)]
        return [read_call(item, json.dumps(item, ensure_ascii=False), keys) for item in value]


def _visible_from(text: str, at: int) -> int:
    """Index of the first character from ``at`` on that is not white space."""
    found = _VISIBLE.search(text, at)
    return found.start() if found else len(text)
