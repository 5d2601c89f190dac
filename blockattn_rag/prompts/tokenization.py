"""Tokenizes blocks for ingestion, answers and training.

Each block is tokenized independently, so its token ids do not depend on other blocks. Padding,
truncation and the parsing of special tokens are mutable state of a tokenizer, which any user of the
tokenizer can change. Blocks are therefore tokenized with private copies. One copy recognizes the
model's added tokens, such as control tokens, in trusted text. The other copies tokenize the rest,
and recognize no added tokens except harmless ones, such as runs of blanks.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span


class PromptIds(NamedTuple):
    """Token ids of a prompt by block, without empty blocks."""

    context: list[list[int]]
    final: list[int]

    @property
    def flat(self) -> list[int]:
        """All token ids in order, as in full mode."""
        return [token for ids in (*self.context, self.final) for token in ids]


class BlockTokenizer:
    """Tokenizer of blocks, with a private copy of a transformers tokenizer. Thread-safe.

    The only special tokens that it adds are the model's prefix, usually BOS, once, at the start of
    the prompt. Control tokens and other added tokens are only parsed in text from a template or
    from the engine's caller. Text between two added tokens is tokenized as one piece, regardless of
    its origin.

    Args:
        tokenizer: Transformers tokenizer. Later changes to it have no effect on token ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._encoder = _private_encoder(tokenizer)
        self.prefix_ids: list[int] = self._encoder.prefix_ids

    def block_ids(self, block: Block, *, first: bool) -> list[int]:
        """Token ids of a context block, with BOS if the block starts the prompt."""
        return self.final_ids(block.rendered_spans, first=first)

    def final_ids(self, text: str | Iterable[Span], *, first: bool) -> list[int]:
        """Token ids of the final block, with BOS if no context precedes it.

        ``text``: Spans, or a trusted string, in which control tokens are parsed.
        """
        ids = self._ids([Span(text, "prompt")] if isinstance(text, str) else text)
        # Most chat templates already include BOS. Do not add it twice.
        has_prefix = ids[: len(self.prefix_ids)] == self.prefix_ids
        return ids if has_prefix or not first else [*self.prefix_ids, *ids]

    def text_ids(self, text: str) -> list[int]:
        """Token ids of a text without BOS, and without parsing control tokens."""
        return self._ids([Span(text, "conversation")])

    def spells_control_token(self, text: str) -> bool:
        return any(token in text for token in self._encoder.control_tokens)

    def with_final_ids(
        self, prompt: BlockPrompt, promote: int = 0
    ) -> tuple[list[Block], list[int]]:
        """Context blocks of a prompt, and token ids of its final block.

        The model needs at least one token in the final block to predict from. If it has none, the
        last context block with tokens becomes the final block; without any, ValueError is raised.

        Args:
            promote: Number of passages at the end of the prompt to compute with the question. The
                final block then begins with the first of these passages.
        """
        passages = [place for place, block in enumerate(prompt.context) if block.is_passage]
        cut = passages[-promote:][0] if promote and passages else len(prompt.context)
        context, final = [*prompt.context[:cut]], list[int]()
        for place, block in enumerate(prompt.context[cut:], cut):
            final += self.block_ids(block, first=place == 0)
        final += self.final_ids(prompt.final_spans, first=not prompt.context)
        while context and not final:
            final = self.block_ids(context.pop(), first=not context)
        if not final:
            raise ValueError("The prompt has no tokens: add a question")
        return context, final

    def prompt_ids(self, prompt: BlockPrompt, promote: int = 0) -> PromptIds:
        """Token ids of a complete prompt. ``promote``: See ``with_final_ids``."""
        context, final = self.with_final_ids(prompt, promote)
        ids = [self.block_ids(block, first=index == 0) for index, block in enumerate(context)]
        return PromptIds([block for block in ids if block], final)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the prefix and of the Rust tokenizer's state, or of vocabulary and class."""
        return hashlib.sha256(f"{self._encoder.digest}:{self.prefix_ids}".encode()).hexdigest()

    def _ids(self, spans: Iterable[Span]) -> list[int]:
        ids: list[int] = []
        # Text since the last added token, and whether that token strips blanks after it.
        run, swallows = "", False
        for span in spans:
            # Lone surrogates cannot be tokenized, so they become question marks.
            text, at = span.text.encode("utf-8", "replace").decode("utf-8"), 0
            for token in self._encoder.added_tokens(text) if span.parses_control else ():
                run += text[at : token.start]
                run = run.rstrip() if token.swallows_before else run
                ids += self._encoder.plain_ids(run, opens=not ids) if run else []
                ids.append(token.token_id)
                run, at, swallows = "", token.end, token.swallows_after
            run += text[at:]
            run = run.lstrip() if swallows else run
            swallows = swallows and not run
        return [*ids, *(self._encoder.plain_ids(run, opens=not ids) if run else [])]


class _FoundToken(NamedTuple):
    """An added token at ``text[start:end]``, and whether it strips blanks before and after it."""

    start: int
    end: int
    token_id: int
    swallows_before: bool
    swallows_after: bool


def _private_encoder(tokenizer: Any) -> _RustEncoder | _PythonEncoder:
    """Create a thread-safe encoder that behaves like ``tokenizer`` does now."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    try:
        return _RustEncoder(backend.to_str()) if backend is not None else _PythonEncoder(tokenizer)
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
    # Single characters and runs of blanks are harmless, and ordinary tokens in some vocabularies.
    return len(token) > 1 and not token.replace("\u2581", " ").isspace()


class _RustEncoder:
    """Encoder with private copies of a ``tokenizers.Tokenizer``, transformers' usual backend.

    The copies share one vocabulary, because copying a vocabulary takes seconds.
    """

    def __init__(self, serialized: str) -> None:
        self._parsing = Tokenizer.from_str(serialized)
        # Callers set these for batches. They must affect neither the digest nor the ids.
        self._parsing.no_truncation()
        self._parsing.no_padding()
        self.digest = hashlib.sha256(self._parsing.to_str().encode()).hexdigest()
        alone = self._parsing.encode("a", add_special_tokens=False).ids
        # Ids that the tokenizer adds before a text: BOS in many models, none in others.
        self.prefix_ids = _prefix_of(self._parsing.encode("a").ids, alone)
        self._parsing.post_processor = None  # The post-processor may change token offsets.
        self._added = self._parsing.get_added_tokens_decoder()
        self._control = {i: t.content for i, t in self._added.items() if _is_control(t.content)}
        self.control_tokens = frozenset(self._control.values())
        self._opening = _Plain(self._parsing, self._added, {"first", "always"})
        self._inside = _Plain(self._parsing, self._added, {"always"})
        self._after_cut = _Plain(self._parsing, self._added, set())

    def added_tokens(self, text: str) -> list[_FoundToken]:
        encoding = self._parsing.encode(text, add_special_tokens=False)
        return [
            _FoundToken(*offsets, token_id, token.lstrip, token.rstrip)
            for token_id, offsets in zip(encoding.ids, encoding.offsets, strict=True)
            if (token := self._added.get(token_id)) is not None
        ]

    def plain_ids(self, text: str, *, opens: bool) -> list[int]:
        """Tokenize a text as plain text. ``opens``: Whether it is at the start of a block."""
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
        """Positions at which to cut a text so that it is not tokenized into control tokens.

        The vocabulary may also contain control tokens, such as ``<s>``. A cut after the first
        character prevents the token. The token for unknown characters needs no cut.
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

    Adds a blank before text only if the tokenizer's scheme, ``"first"`` (at the start of a block)
    or ``"always"``, is in ``schemes``.
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
        # Keep harmless added tokens, such as runs of blanks, which models use for code.
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
    """Change a normalizer's or pre-tokenizer's state so that it adds blanks only in ``schemes``."""
    if "prepend_scheme" in state:
        kept = state["prepend_scheme"] in schemes
        state["prepend_scheme"] = state["prepend_scheme"] if kept else "never"
    elif "add_prefix_space" in state and "always" not in schemes:
        state["add_prefix_space"] = False
    if state.get("type") == "Prepend" and "always" not in schemes:
        state["prepend"] = ""
    return state


class _PythonEncoder:
    """Like ``_RustEncoder``, for tokenizers without a Rust backend. Encodes one text at a time."""

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

    def added_tokens(self, text: str) -> list[_FoundToken]:
        with self._lock:
            pieces = self._tokenizer.tokens_trie.split(text)
        tokens, at = [], 0
        for piece in pieces:
            if piece in self._added:
                token = self._tokenizer.added_tokens_decoder[self._added[piece]]
                strips = token.lstrip, token.rstrip
                tokens.append(_FoundToken(at, at + len(piece), self._added[piece], *strips))
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
