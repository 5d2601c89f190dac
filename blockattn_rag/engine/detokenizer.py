"""Incremental detokenization of generated tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Incremental detokenizer that emits complete characters, up to the first stop string.

    A token may be part of a character, so text is decoded from a short window of recent tokens, as
    in ``tokenizers.decoders.DecodeStream``. Unlike ``DecodeStream``, this class emits an incomplete
    character at the end of the answer, and supports tokenizers written in Python.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self.ids: list[int] = []  # Up to the token that completed a stop string, if any.
        # The decoding window starts at token `_start`. Tokens before `_read` have been decoded.
        self._start = 0
        self._read = 0
        self._held = ""  # Text that may be the beginning of a stop string.
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add one token. Returns the text that it completes, which may be empty."""
        if self.stopped:
            return ""
        self.ids.append(token)
        new = self._unread()
        if new.endswith("\ufffd"):  # The text ends with an incomplete character.
            return ""
        if new:  # Control tokens have no text, so they cannot start a window.
            self._start, self._read = self._read, len(self.ids)
        return self._emit(new, final=False)

    def finish(self) -> str:
        """Return the remaining text after the last token."""
        return self._emit(self._unread(), final=True)

    def _unread(self) -> str:
        seen = self._decode(self.ids[self._start : self._read])
        return self._decode(self.ids[self._start :])[len(seen) :]

    def _decode(self, ids: list[int]) -> str:
        # Cleaning up spaces would change text that was already emitted.
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _emit(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        cut = min((at for s in self._stop if (at := text.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped, text, self._held = True, text[:cut], ""
        else:
            keep = 0 if final else self._possible_stop(text)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that may be the start of a stop string."""
        most = len(text) + 1
        sizes = (n for s in self._stop for n in range(1, min(len(s), most)) if text.endswith(s[:n]))
        return max(sizes, default=0)
