"""Parser for answers with thoughts, text and tool calls, complete or streamed."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from blockattn_rag.output.answers import Said, ThoughtReader, begun_length
from blockattn_rag.output.tool_formats import (
    InvalidToolCall,
    ToolCall,
    ToolFormat,
    decode_json,
    mark_ids,
    new_call_id,
    read_call,
)

Call = ToolCall | InvalidToolCall

_NAME = re.compile(r'\[?\s*\{\s*"name"\s*:\s*"([^"\\]+)"')
_VISIBLE = re.compile(r"\S")
_WINDOW = 8
"""Number of preceding tokens that are decoded with new ones, because they may affect the text."""


class ReadAnswer(NamedTuple):
    """An answer split into text and calls."""

    text: str
    calls: list[ToolCall]
    invalid: list[InvalidToolCall]


class Mark(NamedTuple):
    """Position of a mark in an answer's text. Control tokens have no length: start equals end."""

    start: int
    end: int
    text: str
    number: int = 0


def parse_answer(
    text: str,
    form: ToolFormat,
    names: Collection[str] = (),
    *,
    token_ids: Sequence[int] = (),
    tokenizer: Any = None,
) -> ReadAnswer:
    """Parse a finished answer.

    Args:
        text: Text of the answer without control tokens.
        names: Names of the tools.
        token_ids: Token ids of the answer.
        tokenizer: The model's transformers tokenizer. Marks that are single tokens only count where
            ``token_ids`` contains the token, so that quoted calls remain text. None: marks are
            recognized in the text.
    """
    return CallParser(form, names, tokenizer).parse(text, token_ids)


class CallParser:
    """Parses answers of a model with tools.

    White space next to calls is dropped. Invalid calls are reported, and never repaired. The answer
    ends before a call that repeats the call directly before it, or after the first valid call if
    ``parallel`` is False. Later text and calls are dropped.

    Args:
        names: Names of the tools. In formats without a required mark, a JSON object that is not a
            valid call is an invalid call if it has one of these names, and text otherwise.
        only_first: Whether answers that do not start with a call are entirely text. True if a
            grammar decides between calls and text.
        parallel: Whether an answer may have several calls.
    """

    def __init__(
        self,
        form: ToolFormat,
        names: Collection[str] = (),
        tokenizer: Any = None,
        *,
        only_first: bool = False,
        parallel: bool = True,
    ) -> None:
        self.form = form
        self.names = frozenset(names)
        self.only_first = only_first
        self.parallel = parallel
        self._tokenizer = tokenizer
        ids = {} if tokenizer is None else mark_ids(form, tokenizer)
        self._tokens = {number: mark for mark, number in ids.items()}
        spelled = [re.escape(mark) for mark in form.marks if mark not in ids]
        self._spelled = re.compile("|".join(spelled) or "(?!)")

    def parse(self, text: str, token_ids: Sequence[int] = (), start: int = 0) -> ReadAnswer:
        """Parse a finished answer that starts at ``start``, after the model's thoughts."""
        return _Reader(self, text, self._marks(text, token_ids, start)).read(start)

    def shown(self, text: str, token_ids: Sequence[int] = (), start: int = 0) -> tuple[int, bool]:
        """Return where the text of an incomplete answer ends so far, and whether a call has begun.

        Once a call has begun, the remaining text is unknown until the answer is complete.
        """
        form, answer = self.form, text[start:].lstrip()
        if form.is_bare and (not answer or answer.startswith("{")):
            return start, bool(answer)
        is_token = form.opening in self._tokens.values()
        marks = self._marks(text, token_ids, start)
        opening = next((mark for mark in marks if mark.text == form.opening), None)
        before = text[start:] if opening is None else text[start : opening.start]
        if opening is None and not is_token:
            before = before[: len(before) - begun_length(before, form.opening)]
        if self.only_first and before.strip():
            return len(text), False
        return start + len(before.rstrip()), opening is not None

    def _marks(self, text: str, token_ids: Sequence[int], start: int) -> list[Mark]:
        marks = [Mark(*match.span(), match[0]) for match in self._spelled.finditer(text)]
        if not self._tokens.keys().isdisjoint(token_ids):
            marks = sorted([*marks, *self._token_marks(text, token_ids)])
        # A control token after the thoughts may precede white space that belongs to the thoughts.
        marks = [mark for mark in marks if mark.start >= len(text[:start].rstrip())]
        return [
            Mark(max(mark.start, start), max(mark.end, start), mark.text, number)
            for number, mark in enumerate(marks)
        ]

    def _token_marks(self, text: str, token_ids: Sequence[int]) -> list[Mark]:
        marks, end, first = [], 0, 0
        for index, token in enumerate(token_ids):
            if (mark := self._tokens.get(token)) is None:
                continue
            before = token_ids[max(0, first - _WINDOW) : first]
            new = token_ids[first:index]
            start = end + len(self._decode([*before, *new])) - len(self._decode(before))
            end, first = start + len(self._decode([token])), index + 1
            if end <= len(text):  # The mark was not cut off by a stop string.
                marks.append(Mark(start, end, mark))
        return marks

    def _decode(self, ids: Sequence[int]) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode([*ids], **options))


class AnswerReader:
    """Splits a model's output into thoughts, text and calls during streaming.

    From the first call on, text is held back and returned with the calls at the end.
    """

    def __init__(self, thoughts: ThoughtReader, parser: CallParser | None) -> None:
        self._thoughts = thoughts
        self._parser = parser
        self._output = ""
        self._ids: list[int] = []
        self._answer_length = 0  # Length of the answer at the end of the output.
        self._shown = 0
        self._is_held = False

    def push(self, text: str, token_ids: Sequence[int]) -> Said:
        """Add the next piece, and return the thoughts and text that can be streamed."""
        said = self._split(text)
        self._ids += token_ids
        if self._parser is None or not self._answer_length or self._is_held:
            return said if self._parser is None else Said(said.thoughts)
        start = len(self._output) - self._answer_length
        end, self._is_held = self._parser.shown(self._output, self._ids, start)
        new = self._output[start + self._shown : end]
        self._shown += len(new)
        return Said(said.thoughts, new)

    def finish(self, text: str, token_ids: Sequence[int]) -> tuple[Said, ReadAnswer]:
        """Parse the finished output. Returns the new thoughts and text, and the complete answer."""
        said = self._split(text[len(self._output) :], is_last=True)
        has_only_thoughts = not self._answer_length and bool(text.strip())
        if self._parser is None or has_only_thoughts:
            return said, ReadAnswer(said.answer, [], [])
        answer = self._parser.parse(text, token_ids, len(text) - self._answer_length)
        return Said(said.thoughts, answer.text[self._shown :]), answer

    def _split(self, text: str, *, is_last: bool = False) -> Said:
        self._output += text
        said = self._thoughts.push(text, is_last=is_last)
        self._answer_length += len(said.answer)
        return said


class _Reader:
    def __init__(self, parser: CallParser, text: str, marks: Sequence[Mark]) -> None:
        self._parser = parser
        self._form = parser.form
        self._text = text
        self._marks = marks
        self._starts = [mark.start for mark in marks]
        self._next = 0  # Index of the first unread mark.
        self._calls: list[Call] = []
        self._latest = ""  # The previous call, if only white space has followed.
        self._may_be_bare = parser.form.is_bare
        self._shown = ""
        self._blank = ""  # White space before the calls since the last text.

    def read(self, at: int) -> ReadAnswer:
        is_over = False
        while not is_over and (part := self._read_part(at)) is not None:
            text, calls, at = part
            self._add_text(text, before_call=bool(calls))
            is_over = not all(map(self._add_call, calls))
        if not is_over:
            self._add_text(self._text[at:], before_call=False)
        return ReadAnswer(
            self._shown,
            [call for call in self._calls if isinstance(call, ToolCall)],
            [call for call in self._calls if isinstance(call, InvalidToolCall)],
        )

    def _read_part(self, at: int) -> tuple[str, list[Call], int] | None:
        """Return the text before the next calls, the calls, and their end. None: no more calls."""
        opening = self._next_mark(at, self._form.opening)
        bare = self._bare_start(at, opening) if self._may_be_bare else None
        if bare is not None:
            calls, end = self._read_calls(bare)
            if any(isinstance(call, ToolCall) or call.name in self._parser.names for call in calls):
                return "", calls, end
            if self._parser.only_first:
                return None
            self._may_be_bare = False
            return self._text[at:end], [], end
        if opening is None:
            return None
        text = self._text[at : opening.start]
        if self._parser.only_first and text.strip() and not self._calls:
            return None
        self._may_be_bare = self._form.is_bare
        self._next = opening.number + 1
        return text, *self._read_calls(opening.end)

    def _add_text(self, text: str, *, before_call: bool) -> None:
        body = text.lstrip() if self._latest else text
        kept = body.rstrip() if before_call else body
        if kept:
            self._shown += self._blank + kept
        if self._shown and (kept or not self._latest):
            self._blank = body[len(kept) :]
        if kept:
            self._latest = ""

    def _add_call(self, call: Call) -> bool:
        """Add a call, and return whether the answer continues."""
        said = call.arguments if isinstance(call, ToolCall) else call.text
        latest, self._latest = self._latest, json.dumps([call.name, said], sort_keys=True)
        if latest == self._latest:
            return False
        # Results refer to calls by id, so ids must be unique.
        if call.id in {earlier.id for earlier in self._calls}:
            call = replace(call, id=new_call_id())
        self._calls.append(call)
        return self._parser.parallel or isinstance(call, InvalidToolCall)

    def _bare_start(self, at: int, opening: Mark | None) -> int | None:
        """Return the start of a call without an opening mark, after an optional ``;``, or None."""
        start = self._visible(at)
        if self._calls and self._text.startswith(";", start):
            start = self._visible(start + 1)
        is_marked = opening is not None and opening.start <= start
        return start if self._text.startswith("{", start) and not is_marked else None

    def _read_calls(self, start: int) -> tuple[list[Call], int]:
        form, text = self._form, self._text
        name, call_id, begin = self._read_head(start)
        end = start
        try:
            if begin is None:
                expected = "a tool's name and JSON" if form.arguments_mark else "JSON"
                raise ValueError(f"Expected {expected}, found {text[start : start + 40].strip()!r}")
            values, end = self._read_values(begin, is_arguments=name is not None)
            closing = self._next_mark(end, form.opening, form.closing) if form.closing else None
            stop = closing.start if closing else len(text) if form.closing else end
            if rest := text[end:stop].strip():
                raise ValueError(f"Found {rest[:40]!r} after the JSON of a call")
        except (ValueError, RecursionError) as error:
            return self._read_malformed(start, end, name, str(error))
        shown = text[start:stop].strip()
        if name is not None:
            values = [{"name": name, form.argument_keys[0]: values[0], "id": call_id}]
        shows = [shown] if len(values) == 1 else [json.dumps(v, ensure_ascii=False) for v in values]
        calls = [read_call(v, s, form.argument_keys) for v, s in zip(values, shows, strict=True)]
        return calls, self._end_of_call(closing, stop)

    def _read_malformed(
        self, start: int, at: int, name: str | None, error: str
    ) -> tuple[list[Call], int]:
        if name is None and (match := _NAME.match(self._text, self._visible(start))):
            name = match[1]
        mark = self._next_mark(at, self._form.opening, self._form.closing)
        if mark is None:
            error = f"The answer ends before the call does: {error}"
        stop = len(self._text) if mark is None else mark.start
        shown = self._text[start:stop].strip()
        return [InvalidToolCall(shown, error, name)], self._end_of_call(mark, stop)

    def _end_of_call(self, mark: Mark | None, stop: int) -> int:
        return mark.end if mark and mark.text == self._form.closing else stop

    def _read_head(self, start: int) -> tuple[str | None, str | None, int | None]:
        """Return the name and id before a call's JSON, and the JSON's start, or None if absent."""
        form, begin = self._form, self._visible(start)
        mark = self._next_mark(start, *form.marks) if form.arguments_mark else None
        is_json = bool(form.closing) or self._text.startswith(("[", "{"), begin)
        if is_json and (mark is None or mark.start > begin):
            return None, None, begin
        call_id = None
        name = self._text[start : mark.start].strip() if mark else ""
        if name and mark and mark.text == form.id_mark:
            self._next = mark.number + 1
            following = self._next_mark(mark.end, *form.marks)
            call_id = self._text[mark.end : following.start].strip() if following else None
            mark = following
        if not name or mark is None or mark.text != form.arguments_mark:
            return None, None, None
        return name, call_id, self._visible(mark.end)

    def _read_values(self, at: int, *, is_arguments: bool) -> tuple[list[Any], int]:
        """Parse the JSON of a call (or its arguments), or a list of calls, that starts at index
        ``at``. Returns the objects and the index after them."""
        text = self._text
        if is_arguments or not text.startswith("[", at):
            value, end = decode_json(text, at)
            return [value], end
        values: list[Any] = []
        at = self._visible(at + 1)
        if text.startswith("]", at):
            return [values], at + 1
        while True:
            value, at = decode_json(text, at)
            values.append(value)
            written = [json.dumps(value, sort_keys=True) for value in values[-2:]]
            if len(written) == 2 and written[0] == written[1]:
                return values, len(text)  # Models may repeat calls until the answer is cut off.
            at = self._visible(at)
            if text.startswith("]", at):
                return values, at + 1
            if not text.startswith(",", at):
                raise ValueError(f"Expected ',' or ']', found {text[at : at + 40]!r}")
            at = self._visible(at + 1)

    def _next_mark(self, at: int, *kinds: str) -> Mark | None:
        places = range(max(self._next, bisect_left(self._starts, at)), len(self._marks))
        return next((self._marks[i] for i in places if self._marks[i].text in kinds), None)

    def _visible(self, at: int) -> int:
        match = _VISIBLE.search(self._text, at)
        return match.start() if match else len(self._text)
