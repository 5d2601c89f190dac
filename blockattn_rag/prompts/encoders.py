"""Private copies of a transformers tokenizer.

Padding, truncation and the parsing of special tokens are mutable state of a tokenizer, so any
caller can change a shared one. Blocks are therefore tokenized with private copies. One copy
recognizes the model's added tokens (control tokens and others) in template text. The other copies
only recognize runs of blanks.
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
    """An added token at ``text[start:end]``, including white space that the token strips."""

    start: int
    end: int
    token_id: int
    swallows_before: bool
    swallows_after: bool


def private_encoder(tokenizer: Any) -> RustEncoder | PythonEncoder:
    """Create a thread-safe encoder that behaves like ``tokenizer`` does now.

    Raises:
        UnsupportedModelError: The tokenizer cannot be copied.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        return RustEncoder(backend.to_str()) if backend is not None else PythonEncoder(tokenizer)
    except Exception as error:  # Serializing a custom tokenizer may raise any error.
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} cannot be copied ({error}), but blocks are tokenized with "
            "a private copy: use a tokenizer that can be saved as tokenizer.json"
        ) from error


def _prefix_of(full: list[int], plain: list[int]) -> list[int]:
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    return []


def _is_control(token: str) -> bool:
    """Whether plain text must never be tokenized to an added token.

    Runs of blanks are harmless, and ordinary tokens in some vocabularies, so they are allowed.
    """
    return len(token) > 1 and not token.replace("\u2581", " ").isspace()


class RustEncoder:
    """Copies of a ``tokenizers.Tokenizer``, the usual backend of transformers.

    The copies share one vocabulary, which would take seconds to copy.

    Attributes:
        prefix_ids: Ids that the tokenizer adds before text: usually none, or BOS.
        control_tokens: Added tokens that plain text must never be tokenized to.
        digest: SHA-256 of everything that determines token ids.
    """

    def __init__(self, serialized: str) -> None:
        self._parsing = Tokenizer.from_str(serialized)
        # Callers set these for batches. They must affect neither the digest nor the ids.
        self._parsing.no_truncation()
        self._parsing.no_padding()
        self.digest = hashlib.sha256(self._parsing.to_str().encode()).hexdigest()
        alone = self._parsing.encode("a", add_special_tokens=False).ids
        self.prefix_ids = _prefix_of(self._parsing.encode("a").ids, alone)
        self._parsing.post_processor = None  # The post-processor may change token offsets.
        self._added = self._parsing.get_added_tokens_decoder()
        self._control = {i: t.content for i, t in self._added.items() if _is_control(t.content)}
        self.control_tokens = frozenset(self._control.values())
        self._opening = _Plain(self._parsing, self._added, {"first", "always"})
        self._inside = _Plain(self._parsing, self._added, {"always"})
        self._after_cut = _Plain(self._parsing, self._added, set())

    def added_tokens(self, text: str) -> list[FoundToken]:
        encoding = self._parsing.encode(text, add_special_tokens=False)
        tokens = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if (token := self._added.get(token_id)) is not None:
                tokens.append(FoundToken(start, end, token_id, token.lstrip, token.rstrip))
        return tokens

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        """Tokenize a text without recognizing added tokens.

        Args:
            opens: Whether the text starts the prompt, where some tokenizers add a blank.
        """
        ids: list[int] = []
        pieces = [(text, self._opening if opens else self._inside)]
        while pieces:
            piece, plain = pieces.pop()
            piece_ids, offsets = plain.encode(piece)
            if cuts := self._cuts(piece, piece_ids, offsets):
                parts = [piece[a:b] for a, b in pairwise([0, *cuts, len(piece)])]
                pieces += [(part, self._after_cut) for part in parts[:0:-1]]
                pieces.append((parts[0], plain))
            else:
                ids += piece_ids
        return ids

    def _cuts(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> list[int]:
        """Positions at which to cut a text so that it is not tokenized to control tokens.

        Control tokens may also be in the vocabulary (``<s>`` in many models). A cut after the first
        character prevents the token. The token for unknown characters needs no cut, because the
        text does not contain its spelling.
        """
        return [
            start + 1
            for token_id, (start, end) in zip(ids, offsets, strict=True)
            if token_id in self._control
            and end - start > 1
            and self._control[token_id] in self._opening.normalized(text[start:end])
        ]


class _Plain:
    """Copy of a tokenizer that shares its vocabulary, but has no control tokens.

    Args:
        schemes: Prepend schemes (for a blank before text) to keep: ``"first"`` (at the start of the
            prompt) or ``"always"``. Others are replaced with ``"never"``.
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
        # Keep tokens for runs of blanks: they are harmless, and models use them for code.
        self._blanks: dict[int, int] = {}
        for token_id, token in added.items():
            if not _is_control(token.content):
                self._tokenizer.add_tokens([token])
                own_id: Any = self._tokenizer.token_to_id(token.content)
                self._blanks[own_id] = token_id

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return [self._blanks.get(i, i) for i in encoding.ids], encoding.offsets

    def normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else str(normalizer.normalize_str(text))


def _with_blanks(state: dict[str, Any], schemes: Collection[str]) -> dict[str, Any]:
    """Change the state of a normalizer or pre-tokenizer to only add blanks by ``schemes``."""
    if "prepend_scheme" in state:
        kept = state["prepend_scheme"] in schemes
        state["prepend_scheme"] = state["prepend_scheme"] if kept else "never"
    elif "add_prefix_space" in state and "always" not in schemes:
        state["add_prefix_space"] = False
    if state.get("type") == "Prepend" and "always" not in schemes:
        state["prepend"] = ""
    return state


class PythonEncoder:
    """Like ``RustEncoder``, for tokenizers without a Rust backend. Encodes one text at a time."""

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
        tokens, at = [], 0
        for piece in pieces:
            if piece in self._added:
                token = self._tokenizer.added_tokens_decoder[self._added[piece]]
                strips = token.lstrip, token.rstrip
                tokens.append(FoundToken(at, at + len(piece), self._added[piece], *strips))
            at += len(piece)
        return tokens

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        with self._lock:
            pieces = self._tokenizer.tokenize(text, split_special_tokens=True)
            ids = [self._tokenizer._convert_token_to_id(piece) for piece in pieces]
        if len(text) > 1 and not self.control_tokens.isdisjoint(pieces):
            # There are no token offsets here, so halve the text until no control token is left.
            half = len(text) // 2
            parts = (text[:half], opens), (text[half:], False)
            return [i for part, first in parts for i in self.plain_ids(part, opens=first)]
        return ids
