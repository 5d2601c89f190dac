"""Marks of calls that are tokens, kept apart from text that is spelled like them.

A passage that spells a mark is tokenised as text, and so is an answer that quotes it. Where the
tokenizer has the mark as one token, only this token opens or closes a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace

from blockattn_rag.output.tool_formats import ToolFormat

Marks = Sequence[tuple[int, int]]
"""Where control tokens are in a text: index of the first character, and behind the last."""

_FIRST = 0xDC00  # halves of surrogate pairs, which no tokenizer decodes to
PRIVATE = f"{chr(_FIRST)}-{chr(_FIRST + 3)}"
"""Private characters, for regular expressions: one for each mark of a format."""

_PRIVATE = re.compile(f"[{PRIVATE}]")


class PrivateMarks:
    """Replaces marks that are tokens by private characters, which text cannot hold.

    Args:
        form: how the model writes calls.
        tokens: marks that the tokenizer has as tokens; others are read in text.

    Attributes:
        form: the format, with private characters as marks.
    """

    def __init__(self, form: ToolFormat, tokens: Collection[str]) -> None:
        private = {m: chr(_FIRST + n) for n, m in enumerate(form.marks) if m in tokens}
        self._private = private
        self._plain = {ord(character): mark for mark, character in private.items()}
        self.form = replace(
            form,
            opening=private.get(form.opening, form.opening),
            closing=private.get(form.closing, form.closing),
            arguments_mark=private.get(form.arguments_mark, form.arguments_mark),
            id_mark=private.get(form.id_mark, form.id_mark),
        )

    def private(self, text: str, marks: Marks) -> str:
        """A text with private characters in place of the marks at these places."""
        if not marks and not _PRIVATE.search(text):
            return text
        parts, at = [], 0
        for start, end in marks:
            if mark := self._private.get(text[start:end]):
                parts += [_PRIVATE.sub("\ufffd", text[at:start]), mark]
                at = end
        return "".join([*parts, _PRIVATE.sub("\ufffd", text[at:])])

    def plain(self, text: str) -> str:
        """A text with the marks in place of private characters."""
        return text.translate(self._plain) if self._plain else text
