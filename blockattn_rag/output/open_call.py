"""Calls of tools, from where they open to where they end."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from blockattn_rag.output.call_head import CallHead
from blockattn_rag.output.json_end import JsonEnd
from blockattn_rag.output.marks import PrivateMarks
from blockattn_rag.output.tool_calls import (
    InvalidToolCall,
    ToolCall,
    new_call_id,
    read_call,
    strict_json,
)

Calls = list[ToolCall | InvalidToolCall]

_NAME = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"\\]+)"')
_CUT = "the answer ends before the call does"


class Ended(NamedTuple):
    """What an open call has come to: calls, or text if it was none; and where the rest begins."""

    calls: Calls
    text: str
    end: int


class OpenCall:
    """A call, or a list of calls, that has been opened.

    Args:
        marks: of the format.
    """

    def __init__(self, marks: PrivateMarks) -> None:
        self._marks = marks
        self._form = marks.form
        self._head = CallHead(marks.form)
        self._end: JsonEnd | None = JsonEnd() if marks.form.closing else None
        self._searched = 0  # characters that hold no further opening

    @property
    def has_loop(self) -> bool:
        """Whether a list has the same call twice in a row."""
        return self._end is not None and self._end.repeated is not None

    def read(self, text: str, base: int, final: bool) -> Ended | None:
        """What stands in ``text`` from ``base`` on; None if it has not ended. Each character is
        looked at once.

        Args:
            text: what came so far.
            base: index behind the opening.
            final: whether no more comes.
        """
        if self._form.closing:
            assert self._end is not None
            end = self._end.before(self._form.closing, text, base, final=final)
            after = None if end is None else end + len(self._form.closing)
        else:
            self._head.read(text, base, final=final)
            if self._head.begin is None:
                return self._without_json(text, base, final)
            self._end = self._end or JsonEnd(self._head.begin)
            end = after = self._end.of_value(text, base)
        if end is None and not final:
            return None
        body = text[base:] if end is None else text[base : base + end]
        rest = len(text) if after is None else base + after
        return Ended(self._calls(body, is_cut=end is None), "", rest)

    def _without_json(self, text: str, base: int, final: bool) -> Ended | None:
        """No JSON has begun: if it never does, all up to the next opening is no call."""
        opening = self._form.opening
        end = text.find(opening, base + self._searched)
        if end < 0 and not final:
            self._searched = max(len(text) - base - len(opening) + 1, 0)
            return None
        end = len(text) if end < 0 else end
        found = self._marks.plain(text[base:end]).strip()
        expected = "a tool's name and " if self._form.arguments_mark else ""
        error = f"expected {expected}JSON, found {found[:40]!r}"
        return Ended([InvalidToolCall(found, error)], "", end)

    def _calls(self, text: str, *, is_cut: bool) -> Calls:
        """The calls of a text that has ended."""
        if is_cut and self._end is not None and self._end.repeated is not None:
            text, is_cut = text[: self._end.repeated] + "]", False  # up to the first of equal calls
        name, call_id = self._head.name, self._head.call_id
        body = self._marks.plain(text[self._head.begin or 0 :])
        text = self._marks.plain(text).strip()
        try:
            value: Any = strict_json(body)
        except (ValueError, RecursionError) as error:
            if name is None and (found := _NAME.match(body)):
                name = found[1]
            return [InvalidToolCall(text, _CUT if is_cut else str(error), name)]
        keys = self._form.argument_keys
        if name is not None:
            value = {"name": name, keys[0]: value, "id": call_id or new_call_id()}
        if not isinstance(value, list) or len(value) < 2:
            only = value[0] if isinstance(value, list) and value else value
            return [read_call(only, text, keys)]
        return [read_call(item, json.dumps(item, ensure_ascii=False), keys) for item in value]


class BareCall(OpenCall):
    """A JSON object where a call may stand without an opening: a call, or text.

    Args:
        names: of tools. An object that is no call is a malformed one if it has one of these names.
        blank: white space before it.
    """

    def __init__(self, marks: PrivateMarks, names: Collection[str], blank: str) -> None:
        super().__init__(marks)
        self._names = names
        self._blank = blank

    def read(self, text: str, base: int, final: bool) -> Ended | None:
        if (ended := super().read(text, base, final)) is None:
            return None
        if any(isinstance(one, ToolCall) or one.name in self._names for one in ended.calls):
            return ended
        return Ended([], self._blank + text[base : ended.end], ended.end)
