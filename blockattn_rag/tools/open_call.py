"""Calls of tools, from where they open to where they end."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

from blockattn_rag.tools.calls import InvalidToolCall, ToolCall, new_call_id, read_call, strict_json
from blockattn_rag.tools.formats import ToolFormat
from blockattn_rag.tools.json_end import JsonEnd

Calls = list[ToolCall | InvalidToolCall]

_JSON_BEGINS = re.compile(r"\s*(?=[\[{])")
_NAME = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"\\]+)"')
_CUT = "the answer ends before the call does"


class Ended(NamedTuple):
    """What an open call has come to: calls, or text if it was none; and what follows."""

    calls: Calls
    text: str
    rest: str


class OpenCall:
    """A call, or a list of calls, that has been opened."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._head = _head_of(form)
        self._begin: re.Match[str] | None = None  # all that stands before the JSON
        self._end = JsonEnd()

    def read(self, rest: str, final: bool) -> Ended | None:
        """What stands at the beginning of ``rest``; None if it has not ended.

        Args:
            rest: what came since the opening.
            final: whether no more comes.
        """
        if closing := self._form.closing:
            end = self._end.before(closing, rest, final=final)
            after = None if end is None else end + len(closing)
        else:
            if self._begin is None and (begin := self._head.match(rest)):
                self._begin, self._end = begin, JsonEnd(begin.end())
            if self._begin is None:
                return self._without_json(rest, final)
            end = after = self._end.of_value(rest)
        if end is None and not final:
            return None
        return Ended(self._calls(rest[:end], is_cut=end is None), "", rest[after or len(rest) :])

    def _without_json(self, rest: str, final: bool) -> Ended | None:
        """No JSON has begun: if it never does, all up to the next opening is no call."""
        text, opening, after = rest.partition(self._form.opening)
        if not (opening or final):
            return None
        expected = "a tool's name and " if self._form.arguments_mark else ""
        error = f"expected {expected}JSON, found {text.strip()[:40]!r}"
        return Ended([InvalidToolCall(text.strip(), error)], "", opening + after)

    def _calls(self, text: str, *, is_cut: bool) -> Calls:
        """The calls of a text that has ended."""
        name, call_id = self._named()
        body = text[self._begin.end() if self._begin else 0 :]
        try:
            value: Any = strict_json(body)
        except (ValueError, RecursionError) as error:
            if name is None and (found := _NAME.match(body)):
                name = found[1]
            return [InvalidToolCall(text.strip(), _CUT if is_cut else str(error), name)]
        keys = self._form.argument_keys
        if name is not None:
            value = {"name": name, keys[0]: value, "id": call_id or new_call_id()}
        if not isinstance(value, list) or len(value) < 2:
            only = value[0] if isinstance(value, list) and value else value
            return [read_call(only, text.strip(), keys)]
        return [read_call(item, json.dumps(item, ensure_ascii=False), keys) for item in value]

    def _named(self) -> tuple[str | None, str | None]:
        """Name and id, where they stand before the arguments."""
        found = self._begin.groupdict() if self._begin else {}
        name, call_id = found.get("name"), found.get("id")
        return name and name.strip(), call_id and call_id.strip()


class BareCall(OpenCall):
    """A JSON object where a call may stand without an opening: a call, or text.

    Args:
        names: of tools. An object that is no call is a malformed one if it has one of these names.
        blank: white space before it.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], blank: str) -> None:
        super().__init__(form)
        self._names = names
        self._blank = blank

    def read(self, rest: str, final: bool) -> Ended | None:
        if (ended := super().read(rest, final)) is None:
            return None
        if any(isinstance(one, ToolCall) or one.name in self._names for one in ended.calls):
            return ended
        return Ended([], self._blank + rest[: len(rest) - len(ended.rest)], ended.rest)


def _head_of(form: ToolFormat) -> re.Pattern[str]:
    """What stands between an opening and its JSON."""
    if not form.arguments_mark:
        return _JSON_BEGINS
    id_mark, arguments_mark = re.escape(form.id_mark), re.escape(form.arguments_mark)
    word = r"[^\s\[\]{}][^\[\]{}]*"
    named = rf"\s*(?P<name>{word})(?:{id_mark}(?P<id>{word}))?{arguments_mark}\s*(?=\S)"
    return re.compile(rf"{named}|{_JSON_BEGINS.pattern}")
