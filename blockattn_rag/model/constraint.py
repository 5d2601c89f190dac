"""Grammars in decoding: tokens that an answer cannot go on with are not chosen."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from blockattn_rag.errors import GrammarError
from blockattn_rag.structured.compiler import Matcher


class GrammarConstraint(LogitsProcessor):
    """Holds each row of a batch to its grammar; the last of what changes logits before the choice.

    What a row holds is compared with what it held before, since beams trade places and drafts are
    taken back.

    Args:
        matchers: of each row, fresh ones; None: the row may be anything.
        prompt_width: tokens of the prompt in each row, padding included.
        ends: tokens that end an answer.
    """

    def __init__(
        self, matchers: Sequence[Matcher | None], prompt_width: int, ends: Collection[int]
    ) -> None:
        self._matchers = list(matchers)
        self._prompt_width = prompt_width
        self._ends = set(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[rows, vocabulary]``, minus infinity where the grammar forbids the token."""
        if len(self._matchers) < len(input_ids):  # each row in so many beams
            beams = len(input_ids) // len(self._matchers)
            self._matchers = [one and one.fresh() for one in self._matchers for _ in range(beams)]
        rows = input_ids[:, self._prompt_width :].tolist()
        return restricted(scores, rows, self._matchers, self._ends)


def restricted(
    scores: Tensor,
    rows: Sequence[Sequence[int]],
    matchers: Sequence[Matcher | None],
    ends: Collection[int],
) -> Tensor:
    """Scores of the next token with what the grammars forbid at minus infinity.

    Rows that have ended, and rows that do not fit their grammar (padding, and beams that are given
    up), stay as they are.

    Args:
        scores: ``[rows, vocabulary]``.
        rows: token ids of each answer so far.
        matchers: of each row; None: it may be anything.
        ends: tokens that end an answer.

    Raises:
        GrammarError: other settings forbid every token that a grammar allows.
    """
    vocabulary = scores.shape[-1]
    allowed = np.ones((len(rows), vocabulary), bool)
    held = []
    for place, (row, matcher) in enumerate(zip(rows, matchers, strict=True)):
        if matcher is not None and not (row and row[-1] in ends) and matcher.follow(row):
            allowed[place] = matcher.allowed(vocabulary, ends)
            held.append(place)
    mask = torch.from_numpy(allowed).to(scores.device)
    result = scores.masked_fill(~mask, -torch.inf)
    stuck = (result.amax(dim=-1) == -torch.inf).tolist()
    for place in held:
        if stuck[place]:
            result[place] = _forced_end(allowed[place], ends, result[place])
    return result


def _forced_end(allowed: np.ndarray, ends: Collection[int], scores: Tensor) -> Tensor:
    """An end where the grammar allows nothing else, whatever other settings say."""
    possible = set(np.flatnonzero(allowed).tolist())
    if not possible or possible - set(ends):
        raise GrammarError(
            "no token is left for the answer: the grammar forbids some, and other settings, such "
            "as eos_token_id, bad_words_ids or suppress_tokens, all others"
        )
    return scores.index_fill(0, torch.tensor(sorted(ends), device=scores.device), 0.0)
