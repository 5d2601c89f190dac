"""Constrained decoding: masks the tokens that an answer's grammar forbids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor

from blockattn_rag.errors import GrammarError
from blockattn_rag.model.repetition import (
    JsonStrings,
    LoopEndingMatcher,
    LoopGuard,
    Matching,
    has_text,
    holds_json,
)
from blockattn_rag.output.compiler import GrammarCompiler
from blockattn_rag.output.grammar import Grammar


class AnswerRules:
    """Grammar matchers and loop guards for the answers of the model ``name``."""

    def __init__(self, tokenizer: Any, ends: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, ends, name)

    def start(self, grammar: Grammar | None) -> Future[Any] | None:
        """Start compiling a grammar in the background. ``matcher`` waits for the result. Returns a
        future that completes when compilation succeeds or fails; None without a grammar."""
        return None if grammar is None else self._compiler.start(grammar)

    def matcher(self, grammar: Grammar | None, *, ends_loops: bool = False) -> Matching | None:
        """Create a matcher for one answer. None without a grammar.

        ``ends_loops``: Whether to end JSON strings, and text around JSON, that repeat themselves.
        Raises ``GrammarError`` if the grammar cannot be compiled.
        """
        if grammar is None:
            return None
        matcher = self._compiler.matcher(grammar)
        if not (ends_loops and holds_json(grammar)):
            return matcher
        strings = JsonStrings(self._decode, among_text=has_text(grammar))
        return LoopEndingMatcher(matcher, strings, self._quotes)

    def loop_guard(self, grammar: Grammar | None) -> LoopGuard:
        return LoopGuard(self._decode, grammar)

    @cached_property
    def _quotes(self) -> NDArray[np.int_]:
        texts = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        return np.array([number for number, text in enumerate(texts) if str(text)[:1] == '"'], int)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


class GrammarConstraint(LogitsProcessor):
    """Constrains each row of a batch to its grammar. Must be the last logits processor.

    Matchers process complete rows instead of new tokens, because beams are reordered and draft
    tokens are rolled back between steps. All beams of a prompt share one matcher.

    Args:
        matchers: Matcher of each prompt. None leaves the prompt's rows unconstrained.
        ends: Tokens that end an answer.
        pad: Padding token, which follows answers that end at a stop string without an end token.
        has_strays: Whether rows that are never returned may contain forbidden tokens, as in beam
            search and speculative decoding. The scores of these rows are not changed.
        on_failure: Callback for a grammar that fails; receives the prompt's index and the error.
            The prompt's rows continue unconstrained until the caller ends them. None: raise the
            error.
    """

    def __init__(
        self,
        matchers: Sequence[Matching | None],
        prompt_width: int,
        ends: Collection[int],
        *,
        pad: int | None = None,
        has_strays: bool = False,
        on_failure: Callable[[int, GrammarError], object] | None = None,
    ) -> None:
        self._matchers = list(matchers)
        self._prompt_width = prompt_width
        self._ends = sorted(ends)
        self._pad = pad
        self._has_strays = has_strays
        self._on_failure = on_failure

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Set the scores ``[rows, vocabulary]`` of tokens that the grammar forbids to -inf.

        Scores of rows that have ended are not changed. A row fails if it contains a forbidden
        token, if its grammar cannot be enforced, or if other settings forbid every token that the
        grammar allows.
        """
        rows = input_ids[:, self._prompt_width :].tolist()
        beams = len(rows) // len(self._matchers)
        allowed = np.ones(scores.shape, bool)
        for index, row in enumerate(rows):
            try:
                allowed[index] = self._allowed(row, self._matchers[index // beams], scores.shape[1])
            except GrammarError as error:
                self._fail(index // beams, error)
        result = scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)
        is_stuck = (result.amax(dim=-1) == -torch.inf).cpu().numpy()
        for index in np.flatnonzero(is_stuck & ~allowed.all(axis=1)).tolist():
            # A complete answer may end, even if other settings forbid the end token.
            if np.isin(np.flatnonzero(allowed[index]), self._ends).all() and allowed[index].any():
                result[index, self._ends] = 0.0
                continue
            failure = GrammarError(
                "No token is left for the answer, because other settings forbid every token that "
                "the grammar allows: check eos_token_id, bad_words_ids and suppress_tokens"
            )
            self._fail(index // beams, failure)
            result[index] = scores[index]
        return result

    def check_answer(self, row: Sequence[int], place: int = 0) -> None:
        """Raise ``GrammarError`` if the finished answer to prompt ``place`` contains a token that
        its grammar forbids. A custom decoding loop may bypass the constraint."""
        if (matcher := self._matchers[place]) is not None:
            self._follow(until_end(row, self._ends), matcher, is_kept=True)

    def _allowed(
        self, row: Sequence[int], matcher: Matching | None, vocabulary: int
    ) -> NDArray[np.bool_] | bool:
        """Mask of the tokens that may follow a row. True: all tokens."""
        if matcher is None or not set(self._ends).isdisjoint(row):
            return True
        follows = self._follow(row, matcher, is_kept=not self._has_strays)
        return matcher.allowed(vocabulary, self._ends) if follows else True

    def _follow(self, row: Sequence[int], matcher: Matching, *, is_kept: bool) -> bool:
        """Whether a row matches its grammar and may continue. Raises ``GrammarError`` if the row is
        kept, and contains a forbidden token before its padding."""
        if matcher.follow(row):
            return True
        length = len(row)
        while length and row[length - 1] == self._pad:
            length -= 1
        if is_kept and (length == len(row) or not matcher.follow(row[:length])):
            raise GrammarError(
                f"An answer of {len(row)} tokens contains a token that its grammar forbids: remove "
                "options that bypass the grammar, for example custom_generate"
            )
        return False

    def _fail(self, place: int, error: GrammarError) -> None:
        if self._on_failure is None:
            raise error
        self._matchers[place] = None
        self._on_failure(place, error)


def until_end(row: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    """Return the tokens of a row before its first end token."""
    return row[: next((at for at, token in enumerate(row) if token in ends), len(row))]
