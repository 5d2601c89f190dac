"""What stands between the opening of a call and its JSON."""

from __future__ import annotations

import re

from blockattn_rag.output.marks import PRIVATE
from blockattn_rag.output.tool_formats import ToolFormat

_VISIBLE = re.compile(r"\S")
_NO_NAME = re.compile(rf"[\[\]{{}}{PRIVATE}]")


class CallHead:
    """Finds where JSON begins in a text that grows; each character is looked at once.

    Args:
        form: how calls are written; where it has marks for them, a name and an id come first.

    Attributes:
        begin: index at which JSON begins, counted from ``base``; None: it has not begun.
        name: of the tool, where it stands before the JSON.
        call_id: of the call, where it stands there.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._at = 0
        self._word: int | None = None  # index at which a name or an id begins
        self._mark: str | None = None  # the last one that came
        self._never = False  # what came cannot go on to JSON
        self.begin: int | None = None
        self.name: str | None = None
        self.call_id: str | None = None

    def read(self, text: str, base: int, *, final: bool) -> None:
        """Look for the beginning of JSON.

        Args:
            text: what came so far.
            base: index in the text behind the opening, from which indices are counted.
            final: whether no more comes.
        """
        while self.begin is None and not self._never:
            expected = _VISIBLE if self._word is None else _NO_NAME
            if (found := expected.search(text, base + self._at)) is None:
                self._at = len(text) - base
                return
            at = found.start()
            if self._word is not None:
                if not self._take_word(text, base, at, final):
                    return
            elif self._mark == self._form.id_mark != "":
                self._begin_word(text, base, at, blanks_before=at - base - self._at)
            elif self._mark is not None or text[at] in "[{":
                self.begin = at - base
            else:
                self._begin_word(text, base, at)

    def _begin_word(self, text: str, base: int, at: int, blanks_before: int = 0) -> None:
        if not self._form.arguments_mark or blanks_before or _NO_NAME.match(text, at):
            self._never = True
        self._word = self._at = at - base

    def _take_word(self, text: str, base: int, at: int, final: bool) -> bool:
        """Take a name or an id and the mark behind it; False: the mark has not come whole."""
        self._at = at - base
        marks = [self._form.arguments_mark]
        if self._mark is None and self._form.id_mark:
            marks.append(self._form.id_mark)
        mark = next((one for one in marks if text.startswith(one, at)), None)
        if mark is None:
            rest = text[at : at + max(map(len, marks))]
            if not final and any(len(rest) < len(one) and one.startswith(rest) for one in marks):
                return False
            self._never = True
            return True
        assert self._word is not None
        word = text[base + self._word : at].strip()
        self.name, self.call_id = (word, None) if self._mark is None else (self.name, word)
        self._word, self._mark = None, mark
        self._at += len(mark)
        return True
