"""Where JSON ends in a text that comes piece by piece."""

from __future__ import annotations


class JsonEnd:
    """Finds where JSON ends in a text that grows; each character is looked at once.

    Args:
        start: index at which it begins, counted from ``base``.

    Attributes:
        repeated: index behind the first of two equal objects in a row of the outermost list,
            counted from ``base``; None: there are none.
    """

    def __init__(self, start: int = 0) -> None:
        self._at = start
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._is_list = False
        self._item = ""  # the latest object of the outermost list
        self._item_start = self._item_end = 0
        self.repeated: int | None = None
        self._is_broken = False  # no quote says any more where a string begins or ends

    def of_value(self, text: str, base: int = 0) -> int | None:
        """Index behind the first object or list; None: it has not ended.

        Args:
            base: index in the text from which indices are counted.
        """
        while base + self._at < len(text):
            character, depth = text[base + self._at], self._depth
            self._at += 1
            if self._steps_out(character):
                return self._at
            if self._is_list or depth == 0:
                self._note_item(text, base, depth)
        return None

    def _note_item(self, text: str, base: int, depth: int) -> None:
        """Compare the objects of the outermost list. A character was taken at this depth."""
        if depth == 0 and self._depth == 1:
            self._is_list = text[base + self._at - 1] == "["
        elif (depth, self._depth) == (1, 2):
            self._item_start = self._at - 1
        elif (depth, self._depth) == (2, 1):
            item = text[base + self._item_start : base + self._at]
            if item == self._item and self.repeated is None:
                self.repeated = self._item_end
            self._item, self._item_end = item, self._at

    def before(self, mark: str, text: str, base: int = 0, *, final: bool) -> int | None:
        """Index of the first ``mark`` that stands in no string; None: it has not come.

        Args:
            base: as for ``of_value``.
            final: whether the text is whole. If not, its end may be the beginning of a mark.
        """
        while (at := base + self._at) < len(text):
            if not self._in_string:
                if text.startswith(mark, at):
                    return self._at
                is_near = len(text) - at < len(mark)
                if not final and is_near and mark.startswith(text[at:]):
                    return None
            self._steps_out(text[at])
            self._at += 1
        return None

    def _steps_out(self, character: str) -> bool:
        """Take a character; whether it ends the outermost value."""
        if self._in_string:
            # JSON has no line break in a string: this one was never closed, or goes on behind it.
            self._is_broken |= character == "\n"
            self._in_string = not self._is_broken and (self._escaped or character != '"')
            self._escaped = character == "\\" and not self._escaped
            return False
        self._in_string = character == '"' and not self._is_broken
        self._depth += (character in "{[") - (character in "}]")
        return character in "}]" and self._depth <= 0
