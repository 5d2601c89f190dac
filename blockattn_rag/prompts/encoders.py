"""Token ids of texts, by a private copy of a transformers tokenizer.

A tokenizer that others hold can be changed at any time, by a call alone: padding, truncation and
"parse special tokens" are state of the object. So the ids that decide what is stored come from
copies that nobody else can reach: one knows the model's added tokens (control tokens and all
others), and finds them in text that a template wrote; others know none but runs of blanks.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Collection, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from blockattn_rag.errors import UnsupportedModelError


class FoundToken(NamedTuple):
    """An added token in a text: ``text[start:end]``; it may take the white space beside it."""

    start: int
    end: int
    token_id: int
    swallows_before: bool
    swallows_after: bool


def private_encoder(tokenizer: Any) -> RustEncoder | PythonEncoder:
    """An encoder that gives the ids of ``tokenizer``, as it is now; for many threads at once.

    Raises:
        UnsupportedModelError: the tokenizer cannot be copied.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        return RustEncoder(backend.to_str()) if backend is not None else PythonEncoder(tokenizer)
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


class RustEncoder:
    """Copies of a ``tokenizers.Tokenizer``, which is transformers' usual backend.

    They share one vocabulary: copies of it would take much memory, and seconds to make.

    Attributes:
        prefix_ids: what the tokenizer itself puts before a text: usually nothing or BOS.
        control_tokens: the added tokens that must not come out of plain text.
        digest: sha256 of all that decides ids.
    """

    def __init__(self, serialised: str) -> None:
        self._parsing = Tokenizer.from_str(serialised)
        # Set by callers for batching, without effect on the ids of one text.
        self._parsing.no_truncation()
        self._parsing.no_padding()
        self.digest = hashlib.sha256(self._parsing.to_str().encode()).hexdigest()
        alone = self._parsing.encode("a", add_special_tokens=False).ids
        self.prefix_ids = _prefix_of(self._parsing.encode("a").ids, alone)
        self._parsing.post_processor = None  # it may move the offsets of tokens
        self._added = self._parsing.get_added_tokens_decoder()
        self._control = {i: t.content for i, t in self._added.items() if _is_control(t.content)}
        self.control_tokens = frozenset(self._control.values())
        self._opening = _Plain(self._parsing, self._added, {"first", "always"})
        self._inside = _Plain(self._parsing, self._added, {"always"})
        self._after_cut = _Plain(self._parsing, self._added, set())

    def added_tokens(self, text: str) -> list[FoundToken]:
        """The added tokens in a text, left to right."""
        encoding = self._parsing.encode(text, add_special_tokens=False)
        found = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if (token := self._added.get(token_id)) is not None:
                found.append(FoundToken(start, end, token_id, token.lstrip, token.rstrip))
        return found

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        """Ids of a text in which no added token is recognised.

        ``opens``: nothing stands before it. Some tokenizers put a blank there.
        """
        ids: list[int] = []
        pieces = [(text, self._opening if opens else self._inside)]
        while pieces:
            piece, plain = pieces.pop()
            found, offsets = plain.encode(piece)
            if cuts := self._cuts(piece, found, offsets):
                parts = [piece[a:b] for a, b in pairwise([0, *cuts, len(piece)])]
                pieces += [(part, self._after_cut) for part in parts[:0:-1]]
                pieces.append((parts[0], plain))
            else:
                ids += found
        return ids

    def _cuts(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """Where to cut a text so that no control token comes out of it.

        A control token may be a piece of the model's own vocabulary ("<s>" in many); no piece comes
        out of a text that is cut behind the piece's first character. The token for unknown
        characters is no reason to cut, because the text does not spell it.
        """
        return [
            start + 1
            for token_id, (start, end) in zip(ids, offsets, strict=True)
            if token_id in self._control
            and end - start > 1
            and self._control[token_id] in self._opening.normalised(text[start:end])
        ]


class _Plain:
    """A tokenizer with the vocabulary of another, and none of its control tokens.

    Args:
        schemes: which of the tokenizer's ways to put a blank before a text ("first": before a text
            that nothing stands before, "always": before each) are kept; the others become "never".
    """

    def __init__(
        self, whole: Tokenizer, added: Mapping[int, AddedToken], schemes: Collection[str]
    ) -> None:
        model = {"type": "BPE", "vocab": {}, "merges": []}
        state: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model}
        keep = partial(_with_blanks, schemes=schemes)
        for part in ("normalizer", "pre_tokenizer"):
            if (component := getattr(whole, part)) is not None:
                state[part] = json.loads(component.__getstate__(), object_hook=keep)
        self._tokenizer = Tokenizer.from_str(json.dumps(state))
        self._tokenizer.model = whole.model
        # Runs of blanks say no more than they show, and models that know them were trained on code
        # that is full of them.
        self._blanks: dict[int, int] = {}
        for token_id, token in added.items():
            if not _is_control(token.content):
                self._tokenizer.add_tokens([token])
                own_id: Any = self._tokenizer.token_to_id(token.content)
                self._blanks[own_id] = token_id

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text, and where each stands in it."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [self._blanks.get(i, i) for i in encoding.ids], encoding.offsets

    def normalised(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _with_blanks(state: dict[str, Any], schemes: Collection[str]) -> dict[str, Any]:
    """The state of a normalizer or pre-tokenizer that puts blanks by the given schemes alone."""
    if "prepend_scheme" in state:
        kept = state["prepend_scheme"] in schemes
        state["prepend_scheme"] = state["prepend_scheme"] if kept else "never"
    elif "add_prefix_space" in state and "always" not in schemes:
        state["add_prefix_space"] = False
    if state.get("type") == "Prepend" and "always" not in schemes:
        state["prepend"] = ""
    return state


class PythonEncoder:
    """``RustEncoder`` for a tokenizer that has no Rust backend; one text at a time."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._lock = threading.Lock()
        known = {"vocab": tokenizer.get_vocab(), "class": type(tokenizer).__name__}
        self.digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
        self._added = self._tokenizer.get_added_vocab()
        self.control_tokens = frozenset(filter(_is_control, self._added))
        plain = self._ids("a", add_special_tokens=False)
        self.prefix_ids = _prefix_of(self._ids("a", add_special_tokens=True), plain)

    def _ids(self, text: str, **how: Any) -> list[int]:
        with self._lock:
            return list(self._tokenizer(text, verbose=False, **how)["input_ids"])

    def added_tokens(self, text: str) -> list[FoundToken]:
        with self._lock:
            pieces = self._tokenizer.tokens_trie.split(text)
        found, at = [], 0
        for piece in pieces:
            if piece in self._added:
                token = self._tokenizer.added_tokens_decoder[self._added[piece]]
                strips = token.lstrip, token.rstrip
                found.append(FoundToken(at, at + len(piece), self._added[piece], *strips))
            at += len(piece)
        return found

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        with self._lock:
            pieces = self._tokenizer.tokenize(text, split_special_tokens=True)
            ids = [self._tokenizer._convert_token_to_id(piece) for piece in pieces]
        if len(text) > 1 and not self.control_tokens.isdisjoint(pieces):
            # Pieces have no offsets here: of two halves, one holds the piece whole or none does.
            half = len(text) // 2
            parts = (text[:half], opens), (text[half:], False)
            return [i for part, first in parts for i in self.plain_ids(part, opens=first)]
        return ids
