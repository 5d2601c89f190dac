"""Token ids of texts, by a private copy of a transformers tokenizer.

A tokenizer that others hold can be changed at any time, by a call alone: padding, truncation and
"parse special tokens" are state of the object. So the ids that decide what is stored come from
copies that nobody else can reach. Two copies: one knows the model's added tokens (control tokens
and all others), and finds them in text that a template wrote; the other one knows none.
"""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from blockattn_rag.errors import UnsupportedModelError


class FoundToken(NamedTuple):
    """An added token in a text: ``text[start:end]``; it may take the white space beside it."""

    start: int
    end: int
    token_id: int
    swallows_before: bool
    swallows_after: bool


class Encoder(Protocol):
    """What ``BlockTokenizer`` needs of a tokenizer. Safe to use from many threads."""

    prefix_ids: list[int]
    """What the tokenizer itself puts before a text: usually nothing or BOS."""

    def added_tokens(self, text: str) -> Sequence[FoundToken]:
        """The added tokens in a text, left to right."""

    def spells_control_token(self, text: str) -> bool:
        """Whether one of the added tokens is a control token."""

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        """Ids of a text in which no added token is recognised.

        ``opens``: nothing stands before it. Some tokenizers put a blank there.
        """

    def state(self) -> object:
        """All that decides ids, as JSON."""


def private_encoder(tokenizer: Any) -> Encoder:
    """An encoder that gives the ids of ``tokenizer``, as it is now.

    Raises:
        UnsupportedModelError: the tokenizer cannot be copied.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        return _RustEncoder(backend.to_str()) if backend is not None else _PythonEncoder(tokenizer)
    except Exception as error:  # whatever a foreign tokenizer's serialisation may raise
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} cannot be copied ({error}), and blocks are encoded by a "
            "copy that nobody else can change. Use a tokenizer that can be saved (tokenizer.json)"
        ) from error


def _prefix_of(full: list[int], plain: list[int]) -> list[int]:
    """What stands in ``full`` before ``plain``."""
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _is_control(token: str) -> bool:
    """Whether an added token must not come out of plain text. Runs of blanks may: they say no more
    than they show, and some vocabularies have them as ordinary pieces too."""
    return len(token) > 1 and not token.replace("\u2581", " ").isspace()


class _RustEncoder:
    """Copies of a ``tokenizers.Tokenizer``, which is transformers' usual backend."""

    def __init__(self, serialised: str) -> None:
        state = json.loads(serialised)
        # Set by callers for batching, without effect on the ids of one text.
        state |= {"truncation": None, "padding": None}
        self._state = state
        added = state["added_tokens"]
        self._added = {token["id"]: (token["lstrip"], token["rstrip"]) for token in added}
        self._control_ids = frozenset(t["id"] for t in added if _is_control(t["content"]))
        # A post-processor adds tokens, and may move the offsets of tokens.
        bare = state | {"post_processor": None}
        self._parsing = _tokenizer(bare)
        plain = bare | {"added_tokens": []}
        self._plain = _tokenizer(plain)
        # What follows a control token does not open the text, and gets no blank put before it.
        inside = _without_first_blank(plain)
        self._plain_inside = self._plain if inside == plain else _tokenizer(inside)
        alone = self._parsing.encode("a", add_special_tokens=False).ids
        self.prefix_ids = _prefix_of(_tokenizer(state).encode("a").ids, alone)

    def added_tokens(self, text: str) -> list[FoundToken]:
        found = self._parsing.encode(text, add_special_tokens=False)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [FoundToken(a, b, i, *self._added[i]) for i, (a, b) in pairs if i in self._added]

    def spells_control_token(self, text: str) -> bool:
        return any(found.token_id in self._control_ids for found in self.added_tokens(text))

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        tokenizer = self._plain if opens else self._plain_inside
        encoding = tokenizer.encode(text, add_special_tokens=False)
        # A control token may be a piece of the model's own vocabulary ("<s>" in many), and so come
        # out of plain text. Cut behind its first character, it cannot.
        cuts = [
            start + 1
            for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True)
            if token in self._control_ids and end - start > 1
        ]
        if not cuts:
            return list(encoding.ids)
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids += self.plain_ids(text[start:end], opens=opens and start == 0)
        return ids

    def state(self) -> object:
        return self._state


def _tokenizer(state: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(state))


def _without_first_blank(state: Any) -> Any:
    """A tokenizer's state in which no blank is put before the first piece of a text."""
    if isinstance(state, list):
        return [_without_first_blank(item) for item in state]
    if not isinstance(state, dict):
        return state
    inner = {
        k: v if k in ("vocab", "merges") else _without_first_blank(v) for k, v in state.items()
    }
    return inner | {"prepend_scheme": "never"} if inner.get("prepend_scheme") == "first" else inner


class _PythonEncoder:
    """A copy of a tokenizer that has no Rust backend; one text at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        added = self._tokenizer.get_added_vocab()
        self._control = {token: i for token, i in added.items() if _is_control(token)}
        self._added = added
        plain = self._ids("a", add_special_tokens=False)
        self.prefix_ids = _prefix_of(self._ids("a", add_special_tokens=True), plain)

    def _ids(self, text: str, **how: Any) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text, verbose=False, **how)["input_ids"])

    def added_tokens(self, text: str) -> list[FoundToken]:
        found: list[FoundToken] = []
        with self._lock:
            pieces = self._tokenizer.tokens_trie.split(text)
        at = 0
        for piece in pieces:
            if piece in self._added:
                token = self._tokenizer.added_tokens_decoder[self._added[piece]]
                strips = token.lstrip, token.rstrip
                found.append(FoundToken(at, at + len(piece), self._added[piece], *strips))
            at += len(piece)
        return found

    def spells_control_token(self, text: str) -> bool:
        return any(token in text for token in self._control)

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        with self._lock:
            pieces = self._tokenizer.tokenize(text, split_special_tokens=True)
            ids = [self._tokenizer._convert_token_to_id(piece) for piece in pieces]
        if forged := {piece for piece in pieces if piece in self._control}:
            # Pieces have no offsets here: cut wherever the piece is spelled.
            token = min(forged, key=text.find)
            if (at := text.find(token)) >= 0:
                head, tail = text[: at + 1], text[at + 1 :]
                return [*self.plain_ids(head, opens=opens), *self.plain_ids(tail, opens=False)]
        return ids

    def state(self) -> object:
        return {"vocab": self._tokenizer.get_vocab(), "class": type(self._tokenizer).__name__}
