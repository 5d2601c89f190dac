"""Grammars in decoding: tokens that do not fit an answer's grammar are not chosen."""

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
    LoopEndingMatcher,
    LoopGuard,
    Matching,
    has_text,
    holds_json,
)
from blockattn_rag.output.compiler import GrammarCompiler
from blockattn_rag.output.grammar import Grammar


class AnswerRules:
    """Grammars of one model's answers, and the end of answers that repeat themselves.

    Args:
        tokenizer: Transformers tokenizer.
        ends: Tokens that end an answer.
        name: Name of the model in messages.
    """

    def __init__(self, tokenizer: Any, ends: Collection[int], name: str) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer, ends, name)

    def start(self, grammar: Grammar | None) -> Future[Any] | None:
        """Start compiling a grammar in the background; ``matcher`` waits for it.

        Returns:
            Future that is done when the grammar is compiled or refused; None: there is no grammar.
        """
        return None if grammar is None else self._compiler.start(grammar)

    def matcher(self, grammar: Grammar | None, *, ends_loops: bool = False) -> Matching | None:
        """Matcher of one answer; None: there is no grammar.

        Args:
            grammar: Grammar of the answer.
            ends_loops: Whether JSON strings, and text around JSON, that repeat themselves end.

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
        """Guard of one answer."""
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

    Rows are compared with those of the previous step, since beams trade places and drafts are
    taken back.

    Args:
        matchers: fresh matcher of each row; None leaves a row unconstrained.
        prompt_width: tokens of the prompt in each row, padding included.
        ends: tokens that end an answer.
        pad: token that fills up rows that have ended.
        has_strays: whether forbidden tokens may get into rows that are never returned, as with
            beams and drafts.
        on_failure: Takes the number and the error of a row whose grammar fails. The row goes on
            without a grammar, and the caller ends it. None: the error ends all rows.
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
        self._has_strays = has_strays
        self._on_failure = on_failure

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[rows, vocabulary]``, minus infinity where the grammar forbids the token."""
        if len(self._matchers) < len(input_ids):  # each row in so many beams
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

    def _restricted(
        self,
        scores: Tensor,
        rows: Sequence[Sequence[int]],
        matchers: Sequence[Matching | None],
    ) -> Tensor:
        return restricted(
            scores, rows, matchers, self._ends, pad=self._pad, has_strays=self._has_strays
        )

    def check_answer(self, row: Sequence[int], place: int = 0) -> None:
        """Check a finished answer once more, whatever chose its tokens.

        Args:
            row: tokens of the answer.
            place: row of the batch, before beams.

        Raises:
            GrammarError: the answer does not fit its grammar.
        """
        matcher = self._matchers[place]
        if matcher is not None:
            answer = _until_end(row, self._ends)
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
    """Scores of the next token with what the grammars forbid at minus infinity.

    Rows that have ended keep their scores.

    Args:
        scores: ``[rows, vocabulary]``.
        rows: token ids of each answer so far.
        matchers: matcher of each row; None leaves it unconstrained.
        ends: tokens that end an answer.
        pad: token that fills up rows that have ended without one of ``ends``, at a stop string.
        has_strays: whether rows with a forbidden token keep their scores, too. Beam search gives
            such rows up, and drafts are taken back.

    Raises:
        GrammarError: a row has a forbidden token, a grammar cannot be followed, or other settings
            forbid every token that it allows.
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


def _until_end(row: Sequence[int], ends: Collection[int]) -> Sequence[int]:
    """A row before the first token that ends it."""
    return row[: next((at for at, token in enumerate(row) if token in ends), len(row))]


def _is_padded(row: Sequence[int], matcher: Matching, pad: int | None) -> bool:
    """Whether a row is an answer that fits, and padding."""
    length = len(row)
    while length and row[length - 1] == pad:
        length -= 1
    return length < len(row) and matcher.follow(row[:length])


def _stray(row: Sequence[int]) -> GrammarError:
    return GrammarError(
        f"an answer of {len(row)} tokens has one that its grammar forbids, and is not returned: "
        "something else than the grammar chose it, such as custom_generate; leave that out"
    )


def _forced_end(allowed: np.ndarray, ends: Collection[int], scores: Tensor) -> Tensor:
    """An end where the grammar allows nothing else, whatever other settings say."""
    possible = set(np.flatnonzero(allowed).tolist())
    if not possible or possible - set(ends):
        raise GrammarError(
            "no token is left for the answer: the grammar forbids some, and other settings, such "
            "as eos_token_id, bad_words_ids or suppress_tokens, all others"
        )
    return scores.index_fill(0, torch.tensor(sorted(ends), device=scores.device), 0.0)
