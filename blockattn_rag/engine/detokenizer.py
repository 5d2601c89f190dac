"""Tokens to text, as they come."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any


class Detokenizer:
    """Turns tokens into text as they come: whole characters only, and nothing past a stop string.

    Text is decoded from a short window of the last tokens, since a token alone may be part of a
    character. The same method as ``tokenizers.decoders.DecodeStream``, which has no end (text that
    waits for the rest of a character would be lost) and does not take tokenizers in Python.

    Args:
        tokenizer: a transformers tokenizer, for ``decode``.
        stop: strings that end the answer and are not part of it.
        keep: control tokens that are part of the text; others are left out.

    Attributes:
        text: what has become certain so far.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), keep: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._kept = _kept_ids(tokenizer, keep) if keep else {}
        self._hidden = _hidden_ids(tokenizer, self._kept) if keep else None
        self._ids: list[int] = []
        self._marks: list[tuple[int, int]] = []
        # Text is decoded from a window of tokens that begins at index `_start`. The text of the
        # tokens before index `_read` has been given out.
        self._start = 0
        self._read = 0
        self._held = ""  # text that may be the beginning of a stop string
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Take one token; give the text that has become certain, maybe none."""
        if self.stopped:
            return ""
        self._ids.append(token)
        new = self._unread()
        if new.endswith("\ufffd"):  # a character that is not whole yet
            return ""
        if new:  # else a control token, which cannot be the start of a window
            self._start, self._read = self._read, len(self._ids)
        if (mark := self._kept.get(token)) and new.endswith(mark):
            end = len(self.text) + len(self._held) + len(new)
            self._marks.append((end - len(mark), end))
        return self._emit(new, final=False)

    def marks(self, since: int = 0) -> tuple[tuple[int, int], ...]:
        """Where kept control tokens are in the text. The same characters in ordinary tokens are no
        mark.

        Args:
            since: index in the text from which indices are counted.
        """
        latest = takewhile(lambda mark: mark[0] >= since, reversed(self._marks))
        found = [(start - since, end - since) for start, end in latest if end <= len(self.text)]
        return tuple(reversed(found))

    @property
    def num_tokens(self) -> int:
        """Tokens taken, up to the one that completed a stop string."""
        return len(self._ids)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come."""
        return self._emit(self._unread(), final=True)

    def _unread(self) -> str:
        """The text of the tokens that came since text was given out."""
        seen = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(seen) :]

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [one for one in ids if one not in self._hidden]
        # Cleaning up spaces would change what was already given out.
        text = self._tokenizer.decode(
            ids,
            skip_special_tokens=self._hidden is None,
            clean_up_tokenization_spaces=False,
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
            if keep:  # a mark is given out whole
                at = len(self.text) + len(text) - keep
                latest = takewhile(lambda mark: mark[1] > at, reversed(self._marks))
                keep += max((at - start for start, _ in latest), default=0)
            text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.text += text
        return text

    def _possible_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string may begin with."""
        most = len(text) + 1
        sizes = (n for s in self._stop for n in range(1, min(len(s), most)) if text.endswith(s[:n]))
        return max(sizes, default=0)


def _kept_ids(tokenizer: Any, keep: Sequence[str]) -> dict[int, str]:
    """Tokens to keep, by their ids."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {number: str(token) for number, token in added.items() if str(token) in keep}


def _hidden_ids(tokenizer: Any, kept: Collection[int]) -> set[int]:
    """Ids of the control tokens, less those to keep."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number for number, token in added.items() if token.special}
    return (special | set(tokenizer.all_special_ids)) - set(kept)
