"""Candidate recipes of a repair: comparison with full mode, and selection.

The recipe is chosen in two steps. The first compares the recipe in use and recipes without a cost
per answer, and selects the simplest candidate that the data cannot distinguish from the best (the
one-standard-error rule, Breiman et al. 1984). If this recipe keeps too few of full mode's answers,
the second step adds the smallest cost per answer that is sufficient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.engine.find_recipe import stock_recipe
from blockattn_rag.engine.outline import FREE_SINK
from blockattn_rag.lab.evaluation.collection import Asked
from blockattn_rag.lab.evaluation.fidelity import FidelityRecord, FidelityReport, compare_each
from blockattn_rag.lab.evaluation.metrics import contains_answer
from blockattn_rag.lab.evaluation.records import FULL, PLAIN, Row
from blockattn_rag.lab.repair.plan import Limits
from blockattn_rag.lab.repair.teacher import Teacher, divergence
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.model.recompute import can_recompute
from blockattn_rag.prompts.sinks import HEAD

logger = logging.getLogger("blockattn_rag")

Tick = Callable[[int, int], None]
"""Progress callback: completed work, and total work."""

_GENERATED_AT_ONCE = 8

_CONFIDENCE = 1.96
"""Number of standard errors by which a recipe must be better to replace the recipe in use."""

_SHARES = (0.05, 0.1, 0.2)
"""Candidate fractions of the passages' tokens to recompute."""

_FEWEST_RIGHT = 8
"""Minimum number of correct full-mode answers for comparing correct answers instead of tokens."""

Losses = Mapping[str, NDArray[np.float64]]
"""Losses of recipes on the same questions, ``[questions]``, by name, the simplest recipe first."""

IN_USE = "in use"
"""Candidate name of the model's current recipe."""


def free_recipes(
    adapters: Mapping[str, Correction], in_use: Recipe | None = None
) -> dict[str, Recipe]:
    """Return the candidates of the first step, by name, the simplest first. The recipe in use comes
    before new adapters."""
    recipes = {PLAIN: Recipe(), FREE_SINK: Recipe(FREE_SINK)}
    if in_use is not None:
        recipes[IN_USE] = in_use
    for name, adapter in adapters.items():
        recipe = Recipe(FREE_SINK, adapter, fingerprints=(adapter.fingerprint,))
        recipes[f"{FREE_SINK} + {name}"] = recipe
    return recipes


def count_candidates(model: BlockModel, in_use: Recipe | None) -> int:
    """Maximum number of candidates in ``free_recipes`` and ``costly_recipes`` together."""
    return 4 + (in_use is not None) + len(costly_recipes(model, "", Recipe()))


def costly_recipes(model: BlockModel, name: str, free: Recipe) -> dict[str, Recipe]:
    """Return variants of a recipe with a (higher) cost per answer, by name, the cheapest first.
    Variants recompute tokens or, if the model cannot recompute, promote a passage. The sink of
    recomputing variants is ``HEAD``, which makes recomputation more effective. Recipes with an
    adapter keep their sink, because the adapter was fitted with it."""
    if can_recompute(model):
        base, name = (free, name) if free.adapter else (Recipe(HEAD), HEAD)
        return {
            f"{name} + recompute {100 * share:g} %": replace(base, recompute=share)
            for share in _SHARES
            if share > base.recompute
        }
    return {} if free.promote else {f"{name} + promote 1": replace(free, promote=1)}


@dataclass(frozen=True, slots=True)
class Choice:
    """Chosen candidate.

    Args:
        recipes: All candidates by name: those of the first step, the simplest first, then those of
            the second step, the cheapest first.
        losses: Mean loss of each candidate, by name.
        shares: Fraction of full mode's answers that each candidate of the second step keeps. The
            second step includes the best candidate of the first.
    """

    name: str
    recipes: dict[str, Recipe]
    losses: dict[str, float]
    shares: dict[str, float]


@dataclass(frozen=True)
class Comparer:
    """Compares recipes with full mode, by predicted tokens and correct answers, and chooses one."""

    engine: BlockAttentionEngine
    teacher: Teacher
    limits: Limits
    records_path: Path

    def adapter_helps(
        self, asked: Sequence[Asked], recipes: Mapping[str, Recipe], tick: Tick
    ) -> bool:
        """Whether the last recipe, which has an adapter, is better than ``FREE_SINK`` alone."""
        *_, fitted = recipes
        losses = self._losses(asked, {name: recipes[name] for name in (FREE_SINK, fitted)}, tick)
        loss, before = losses[fitted].mean(), losses[FREE_SINK].mean()
        if loss >= before:
            logger.warning(
                "An adapter does not improve %s: on %d questions, the divergence from full mode "
                "is %.3f with it and %.3f without. The adapter is not trained further",
                self.engine.model.name, len(asked), loss, before,
            )  # fmt: skip
        return bool(loss < before)

    def choice(
        self, asked: Sequence[Asked], free: Mapping[str, Recipe], tolerance: float, tick: Tick
    ) -> Choice:
        model, in_use = self.engine.model, IN_USE if IN_USE in free else None
        fewest = self.limits.fewest_to_choose
        best = choose(self._losses(asked, free, tick), in_use, fewest)
        least = free[best]
        if in_use is None and len(asked) < fewest:
            best, least = FREE_SINK, stock_recipe(model)
        priced = {best: free[best], **costly_recipes(model, best, free[best])}
        priced = {
            name: recipe
            for name, recipe in priced.items()
            if recipe.recompute >= least.recompute and recipe.promote >= least.promote
        }
        recipes = {**free, **priced}
        losses = {k: float(v.mean()) for k, v in self._losses(asked, recipes, tick).items()}
        shares = self._shares(asked, priced, tick)
        return Choice(cheapest(shares, tolerance), recipes, losses, shares)

    def _losses(
        self, asked: Sequence[Asked], recipes: Mapping[str, Recipe], tick: Tick
    ) -> dict[str, NDArray[np.float64]]:
        """Mean divergences per question, with the first token counted twice, as in training."""
        records = self.compared(asked, recipes, tick).records
        losses = [(r.mode, (r.kl * r.tokens + r.first_kl) / (r.tokens + 1)) for r in records]
        return {name: np.array([loss for mode, loss in losses if mode == name]) for name in recipes}

    def _shares(
        self, asked: Sequence[Asked], recipes: Mapping[str, Recipe], tick: Tick
    ) -> dict[str, float]:
        """Measure the fraction of full mode's answers that each recipe keeps. Counts correct
        answers if there are enough, else tokens that the recipe also predicts."""
        report = self.compared(asked, recipes, tick)
        right = self.right(asked, recipes)
        full = right.pop(FULL, [])
        if sum(full) < _FEWEST_RIGHT:
            return {name: report[name].agreement.mean for name in recipes}
        return {
            name: sum(a and b for a, b in zip(full, found, strict=True)) / sum(full)
            for name, found in right.items()
        }

    def compared(
        self, asked: Sequence[Asked], recipes: Mapping[str, Recipe], tick: Tick
    ) -> FidelityReport:
        rows = [Row(name, recipe) for name, recipe in recipes.items()]
        noted = {"measured": "repair"}
        return compare_each(asked, rows, self.compare, noted, self.records_path, tick)

    def compare(self, asked: Asked, rows: Sequence[Row]) -> list[FidelityRecord]:
        """Compare several rows with full mode on one prompt."""
        answer = self.teacher(asked.prompt)
        records = []
        for row in rows:
            logits = self.engine.answer_logits(asked.prompt, answer.ids.tolist(), **row.options)
            per_token = divergence(answer.predictions, logits)
            agrees = logits.argmax(-1) == answer.predictions.to(logits.device).tokens[:, 0]
            records.append(FidelityRecord.of(asked, row, per_token, agrees))
        return records

    def right(self, asked: Sequence[Asked], recipes: Mapping[str, Recipe]) -> dict[str, list[bool]]:
        """Return whether each answer in full mode and with each recipe is correct, by row name, for
        the questions with reference answers. Empty without such questions."""
        known = [one for one in asked if one.answers]
        if not known:
            return {}
        prompts = [one.prompt for one in known]
        answers = [self.teacher(prompt).ids.tolist() for prompt in prompts]
        decode = self.engine.model.tokenizer.tokenizer.decode
        texts = {FULL: [decode(ids, skip_special_tokens=True) for ids in answers]}
        options = {"max_new_tokens": self.limits.answer_tokens, "batch_size": _GENERATED_AT_ONCE}
        for name, recipe in recipes.items():
            generations = self.engine.generate_batch(prompts, recipe=recipe, **options)
            texts[name] = [generation.text for generation in generations]
        return {
            name: [bool(contains_answer(t, q.answers)) for t, q in zip(of, known, strict=True)]
            for name, of in texts.items()
        }


def choose(losses: Losses, in_use: str | None = None, fewest: int = 0) -> str:
    """Choose a recipe by the losses of all candidates of the first step. Chooses the first recipe
    whose loss is at most one standard error above the lowest loss. The recipe in use is kept unless
    the chosen recipe is better by more than 1.96 standard errors, on at least ``fewest`` questions.
    Standard errors are those of paired differences per question."""
    best = min(losses, key=lambda name: losses[name].mean())
    chosen = next(name for name in losses if _difference(losses, name, best) <= 1)
    if in_use is None:
        return chosen
    is_better = _difference(losses, in_use, chosen) > _CONFIDENCE
    return chosen if is_better and len(losses[chosen]) >= fewest else in_use


def cheapest(shares: Mapping[str, float], tolerance: float) -> str:
    """Return the first recipe with a share of at least ``tolerance``, else that with the highest.
    ``shares``: Kept fraction of full mode's answers by recipe name, the cheapest recipe first."""
    within = (name for name, share in shares.items() if share >= tolerance)
    return next(within, max(shares, key=lambda name: shares[name]))


def _difference(losses: Losses, name: str, other: str) -> float:
    """Return by how many standard errors the loss of ``name`` exceeds that of ``other``."""
    difference = losses[name] - losses[other]
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return float(mean / error) if error else math.copysign(math.inf, mean) if mean else 0.0
