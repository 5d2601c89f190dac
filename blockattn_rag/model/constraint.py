"""Constrained decoding: masks tokens that an answer's grammar forbids."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LogitsProcessor

from blockattn_rag.errors import GrammarError
from blockattn_rag.model.repetition import (
    LoopEndingMatcher,
    LoopGuard,
    Matching,
    has_text,
    holds_json,
)
from blockattn_rag.output.compiler import GrammarCompiler
from blockattn_rag.output.grammar import Grammar


class AnswerRules:
    """Grammar matchers and loop guards for one model's answers.

    Args:
        name: Name of the model in messages.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, ends, name)

    def start(self, grammar: Grammar | None) -> Future[Any] | None:
        """Start compiling a grammar in the background. ``matcher`` waits for the result.

        Returns:
            Future that completes when the grammar is compiled or refused; None without a grammar.
        """
        return None if grammar is None else self._compiler.start(grammar)

    def matcher(self, grammar: Grammar | None, *, ends_loops: bool = False) -> Matching | None:
        """Matcher for one answer; None without a grammar.

        Args:
            ends_loops: Whether to end JSON strings, and text around JSON, that repeat themselves.

        Raises:
            GrammarError: The grammar cannot be compiled.
            UnsupportedModelError: No grammar can be compiled for this model's tokenizer.
            ImportError: The extra ``structured`` is not installed.
        """
        if grammar is None:
            return None
        matcher = self._compiler.matcher(grammar)
        if not (ends_loops and holds_json(grammar)):
            return matcher
        among_text = has_text(grammar)
        return LoopEndingMatcher(matcher, self._decode, self._quotes, among_text=among_text)

    def loop_guard(self, grammar: Grammar | None) -> LoopGuard:
        """Loop guard for one answer."""
        return LoopGuard(self._decode, grammar)

    @cached_property
    def _quotes(self) -> NDArray[np.int_]:
        """Tokens that begin with a quotation mark."""
        texts = self._tokenizer.convert_ids_to_tokens(range(len(self._tokenizer)))
        return np.array([number for number, text in enumerate(texts) if str(text)[:1] == '"'], int)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return str(text)


class GrammarConstraint(LogitsProcessor):
    """Constrains each row of a batch to its grammar. Must be the last logits processor.

    Matchers follow complete rows instead of new tokens, because beams change places and drafts are
    rolled back between steps.

    Args:
        matchers: Fresh matcher per row. None leaves a row unconstrained.
        prompt_width: Number of prompt tokens in each row, including padding.
        pad: Token that pads rows that have ended.
        has_strays: Whether rows that are never returned, as with beams and drafts, may contain
            forbidden tokens.
        on_failure: Callback for a row whose grammar fails; receives the row's index and the error.
            The row continues without a grammar until the caller ends it. None: the error ends all
            rows.
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
        self._ends = set(ends)
        self._pad = pad
        self._on_failure = on_failure
        self._restricted = partial(restricted, ends=self._ends, pad=pad, has_strays=has_strays)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[rows, vocabulary]``, set to -inf for tokens that the grammar forbids."""
        if len(self._matchers) < len(input_ids):  # each row becomes several beams
            beams = len(input_ids) // len(self._matchers)
            self._matchers = [one and one.fresh() for one in self._matchers for _ in range(beams)]
        rows = input_ids[:, self._prompt_width :].tolist()
        try:
            return self._restricted(scores, rows, self._matchers)
        except GrammarError:
            if self._on_failure is None:
                raise
            for place, (row, matcher) in enumerate(zip(rows, self._matchers, strict=True)):
                try:
                    self._restricted(scores[place : place + 1], [row], [matcher])
                except GrammarError as error:
                    self._matchers[place] = None
                    self._on_failure(place, error)
            return self._restricted(scores, rows, self._matchers)

    def check_answer(self, row: Sequence[int], place: int = 0) -> None:
        """Check a finished answer again, because a custom decoding loop may bypass the constraint.

        Args:
            row: Token ids of the answer.
            place: Row of the batch, before it is repeated for beams.

        Raises:
            GrammarError: the answer does not fit its grammar.
        """
        matcher = self._matchers[place]
        if matcher is not None:
            answer = until_end(row, self._ends)
            if not (matcher.follow(answer) or _is_padded(answer, matcher, self._pad)):
                raise _stray(answer)


def restricted(
    scores: Tensor,
    rows: Sequence[Sequence[int]],
    matchers: Sequence[Matching | None],
    ends: Collection[int],
    *,
    pad: int | None = None,
    has_strays: bool = False,
) -> Tensor:
    """Set the scores of tokens that the grammars forbid to -inf.

    Rows that have ended keep their scores.

    Args:
        scores: Scores of the next token, ``[rows, vocabulary]``.
        rows: Token ids of each answer so far.
        matchers: Matcher per row. None leaves a row unconstrained.
        pad: Token that pads rows that have ended at a stop string, without one of ``ends``.
        has_strays: Whether rows with a forbidden token also keep their scores. Beam search drops
            such rows, and drafts are rolled back.

    Raises:
        GrammarError: a row has a forbidden token, a grammar cannot be followed, or other settings
            forbid every token that the grammar allows.
    """
    vocabulary = scores.shape[-1]
    allowed = np.ones((len(rows), vocabulary), bool)
    held = []
    for place, (row, matcher) in enumerate(zip(rows, matchers, strict=True)):
        if matcher is None or not set(ends).isdisjoint(row):
            continue
        if matcher.follow(row):
            allowed[place] = matcher.allowed(vocabulary, ends)
            held.append(place)
        elif not (has_strays or _is_padded(row, matcher, pad)):
            raise _stray(row)
    mask = torch.from_numpy(allowed).to(scores.device)
    result = scores.masked_fill(~mask, -torch.inf)
    stuck = (result.amax(dim=-1) == -torch.inf).tolist()
    for place in held:
        if stuck[place]:
            result[place] = _forced_end(allowed[place], ends, result[place])
    return result


def until_end(row: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    """The tokens of a row before its first end token."""
    return row[: next((at for at, token in enumerate(row) if token in ends), len(row))]


def _is_padded(row: Sequence[int], matcher: Matching, pad: int | None) -> bool:
    """Whether a row is an answer that fits the grammar, followed by padding."""
    length = len(row)
    while length and row[length - 1] == pad:
        length -= 1
    return length < len(row) and matcher.follow(row[:length])


def _stray(row: Sequence[int]) -> GrammarError:
    return GrammarError(
        f"An answer of {len(row)} tokens has one that its grammar forbids, and is not returned: "
        "another option, such as custom_generate, bypassed the grammar; remove that option"
    )


def _forced_end(allowed: np.ndarray, ends: Collection[int], scores: Tensor) -> Tensor:
    """Allow the end tokens if the grammar allows only them, even if other settings do not."""
    possible = set(np.flatnonzero(allowed).tolist())
    if not possible or possible - set(ends):
        raise GrammarError(
            "No token is left for the answer: other settings, such as eos_token_id, bad_words_ids "
            "or suppress_tokens, forbid every token that the grammar allows"
        )
    return scores.index_fill(0, torch.tensor(sorted(ends), device=scores.device), 0.0)
