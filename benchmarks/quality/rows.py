"""Rows of the tables: full mode, block mode with recipes, full mode with only the best passage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import nan
from typing import Any, NamedTuple, Self

from sets import Item
from torch import Tensor

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation
from blockattn_rag.lab.evaluation.fidelity import FidelityRecord, full_answer
from blockattn_rag.lab.evaluation.records import Row
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import PromptFormat

FULL, BEST = "full", "best passage only"

EARLIER = (
    *("recompute 10 %", "recompute 20 %"),
    *(f"{one}, recompute 10 %" for one in ("sink", "recipe")),
)
"""Rows of an earlier version, which selected tokens by the attention in all layers."""


@dataclass(frozen=True, slots=True)
class Record:
    """Answer to a question in a row.

    Args:
        kl, agreement: See ``lab.evaluation.fidelity``. NaN if the prompt has other passages.
        computed_tokens, prompt_tokens: Number of computed tokens, and of all prompt tokens.
        ttft_s: Time to first token in seconds. NaN for rows that were added after full mode's row,
            because the load on the machine had changed.
    """

    set: str
    id: str
    row: str
    right: int
    f1: float
    kl: float
    agreement: float
    computed_tokens: int
    prompt_tokens: int
    ttft_s: float
    output: str

    @property
    def name(self) -> str:
        return self.row

    @classmethod
    def of(
        cls,
        item: Item,
        row: str,
        found: Generation,
        *,
        scores: tuple[float, float] = (nan, nan),
        is_timed: bool = False,
    ) -> Self:
        """Return the record of an answer. ``scores``: KL and agreement."""
        kl, agreement = scores
        return cls(
            set=item.set,
            id=item.id,
            row=row,
            right=int(item.is_right(found.text)),
            f1=round(item.f1(found.text), 4),
            kl=kl,
            agreement=agreement,
            computed_tokens=found.stats.computed_tokens,
            prompt_tokens=found.stats.prompt_tokens,
            ttft_s=round(found.stats.ttft_s, 4) if is_timed else nan,
            output=found.text,
        )


class Answerer:
    """Answers a question in every row.

    Args:
        engine: Engine without a recipe.
        form: Prompt format of the engine's model.
        recipes: Recipes for block mode, by row name.
        max_new_tokens: Maximum number of tokens per answer.
    """

    def __init__(
        self,
        engine: BlockAttentionEngine,
        form: PromptFormat,
        recipes: dict[str, Recipe],
        *,
        max_new_tokens: int,
    ) -> None:
        self.engine = engine
        self.recipes = recipes
        self._form = form
        self._options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": False}

    @property
    def rows(self) -> list[str]:
        """Return the names of all rows, in order."""
        return [FULL, *self.recipes, BEST]

    def answer(self, item: Item, rows: Collection[str]) -> Iterator[Record]:
        """Answer a question in some rows."""
        prompt = self.prompt(item)
        if FULL in rows:
            full, expected = self.full_answer(prompt)
            compare = _Comparison(item, full.token_ids, expected, is_timed=True)
            yield compare.record(FULL, full, expected)
        else:  # Compute the prompt once instead of twice, without timing.
            ids, expected = full_answer(self.engine, prompt, self._options["max_new_tokens"])
            compare = _Comparison(item, ids, expected, is_timed=False)
        for name, recipe in self.recipes.items():
            if name in rows:
                yield self._answered(name, compare, prompt, recipe)
        if BEST in rows:
            best = self.prompt(replace(item, passages=(item.passages[item.best],)))
            found = self.engine.generate(best, mode="full", **self._options)
            yield compare.record(BEST, found, None)

    def _answered(
        self, row: str, compare: _Comparison, prompt: BlockPrompt, recipe: Recipe
    ) -> Record:
        """Encode the blocks with a recipe, then answer the question."""
        self.engine.precompute(prompt.context, as_prompt=True, recipe=recipe)
        found = self.engine.generate(prompt, recipe=recipe, **self._options)
        logits = self.engine.answer_logits(prompt, compare.answer, recipe=recipe)
        return compare.record(row, found, logits)

    def full_answer(self, prompt: BlockPrompt) -> tuple[Generation, Tensor]:
        """Return full mode's answer, and its log-probabilities ``[answer tokens, vocab]``."""
        full = self.engine.generate(prompt, mode="full", **self._options)
        logits = self.engine.answer_logits(prompt, full.token_ids, mode="full")
        return full, logits.double().log_softmax(-1)

    def prompt(self, item: Item) -> BlockPrompt:
        """Return the prompt of a question."""
        tokenizer = self.engine.model.tokenizer.tokenizer
        return self._form.prompt(item.question, item.passages, tokenizer)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A question with full mode's answer, and its log-probabilities ``[answer tokens, vocab]``.

    ``is_timed``: Whether times can be compared with full mode's record.
    """

    item: Item
    answer: Sequence[int]
    expected: Tensor
    is_timed: bool

    def record(self, row: str, found: Generation, logits: Tensor | None) -> Record:
        scores = (nan, nan) if logits is None else divergence(logits, self.expected)
        return Record.of(self.item, row, found, scores=scores, is_timed=self.is_timed)


def divergence(logits: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return KL and agreement as in ``lab.evaluation.fidelity``, rounded.

    Args:
        logits: Logits ``[answer tokens, vocab]``.
        expected: Full mode's log-probabilities, of the same shape.
    """
    compared = FidelityRecord.compared(_Named("", ""), Row(""), logits, expected)
    return round(compared.kl, 6), round(compared.agreement, 4)


class _Named(NamedTuple):
    """Question id in the form that ``FidelityRecord`` requires."""

    id: str
    digest: str
