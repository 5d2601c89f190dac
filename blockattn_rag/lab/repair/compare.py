"""Candidate recipes of a repair: comparison with full mode, and selection.

The recipe is chosen in two steps. The first step selects, among the candidates without a cost per
answer, the simplest that the data cannot distinguish from the best (the one-standard-error rule,
Breiman et al. 1984). If this recipe does not keep enough of full mode's answers, the second step
adds the smallest cost per answer with which it does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.evaluation.datasets import digest_of
from blockattn_rag.lab.evaluation.fidelity import FidelityRecord, FidelityReport, compare_each
from blockattn_rag.lab.evaluation.metrics import contains_answer
from blockattn_rag.lab.evaluation.records import FULL, PLAIN, Row
from blockattn_rag.lab.repair.data import Question
from blockattn_rag.lab.repair.teacher import Teacher, divergence
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.model.recompute import can_recompute
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.sinks import HEAD, NO_SINK

logger = logging.getLogger("blockattn_rag")

Tick = Callable[[int, int], None]
"""Progress callback: completed work, and total work."""

_GENERATED_AT_ONCE = 8

_CONFIDENCE = 1.96
"""Number of standard errors by which a recipe must be better to replace another."""

_SHARES = (0.05, 0.1, 0.2)
"""Candidate fractions of tokens to recompute."""

_FEWEST_RIGHT = 8
"""Minimum number of full mode's correct answers. With fewer, recipes are compared by tokens."""

_FEW = 8
"""Minimum number of questions. With fewer, differences are too uncertain to replace a recipe."""

Losses = Mapping[str, NDArray[np.float64]]
"""Losses of recipes on the same questions, ``[questions]``, by name, the simplest recipe first."""

IN_USE = "in use"
"""Candidate name of the model's current recipe."""


def free_recipes(
    model: BlockModel,
    sink: str,
    closed: Correction,
    trained: Correction | None,
    in_use: Recipe | None = None,
) -> dict[str, Recipe]:
    """Return the candidates without a cost per answer, by name, the simplest first.

    The recipe in use is also a candidate, and comes before new adapters.
    """
    prefix = "" if sink == NO_SINK else f"{sink} + "
    recipes = {PLAIN: Recipe()}
    if sink != NO_SINK:
        recipes[sink] = Recipe(sink)
    if in_use is not None:
        recipes[IN_USE] = in_use
    fitted = {"closed form": closed} | ({"trained": trained} if trained is not None else {})
    for name, adapter in fitted.items():
        recipes[prefix + name] = Recipe(sink, adapter, fingerprints=(model.fingerprint,))
    return recipes


def count_candidates(model: BlockModel, sink: str, in_use: Recipe | None) -> int:
    """Maximum number of candidates in ``free_recipes`` and ``costly_recipes`` together."""
    without, closed, trained = 1, 1, 1
    has_sink, has_in_use = sink != NO_SINK, in_use is not None
    costly = len(costly_recipes(model, "", Recipe()))
    return without + has_sink + has_in_use + closed + trained + costly


def costly_recipes(model: BlockModel, name: str, free: Recipe) -> dict[str, Recipe]:
    """Return variants that keep more answers at a cost per answer, by name, the cheapest first.

    Variants recompute tokens or, if the model cannot recompute, promote a passage. Passages are
    encoded after the head, which makes recomputation more effective, unless an adapter was fitted
    to another sink.
    """
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
        recipes: All candidates by name: first those without a cost per answer, the simplest first,
            then those with a cost, the cheapest first.
        shares: Fraction of full mode's answers that each candidate of the last step keeps, by name.
    """

    name: str
    recipes: dict[str, Recipe]
    losses: Losses
    shares: dict[str, float]

    def loss(self, name: str) -> float:
        return float(self.losses[name].mean())


class Comparer:
    """Compares recipes with full mode at each token of the teacher's answers."""

    def __init__(
        self,
        engine: BlockAttentionEngine,
        teacher: Teacher,
        prompt: Callable[[Question], BlockPrompt],
        records_path: Path,
    ) -> None:
        self._engine, self._teacher, self._prompt = engine, teacher, prompt
        self._records_path = records_path

    def adapter_helps(
        self, samples: Sequence[Question], recipes: Mapping[str, Recipe], tick: Tick
    ) -> bool:
        """Whether the last recipe, with an adapter, is better than the one before, without."""
        sink, closed = [name for name in recipes if name != IN_USE][-2:]
        losses = self.losses(samples, {name: recipes[name] for name in (sink, closed)}, tick)
        loss, before = losses[closed].mean(), losses[sink].mean()
        if loss >= before:
            logger.warning(
                "An adapter does not improve %s: on %d questions, the divergence from full mode "
                "is %.3f with it and %.3f without. Training is skipped, and only recipes with a "
                "cost per answer are compared",
                self._engine.model.name, len(samples), loss, before,
            )  # fmt: skip
        return bool(loss < before)

    def choice(
        self,
        samples: Sequence[Question],
        free: Mapping[str, Recipe],
        tolerance: float,
        max_new_tokens: int,
        tick: Tick,
    ) -> Choice:
        best = choose(self.losses(samples, free, tick), IN_USE if IN_USE in free else None)
        priced = {best: free[best], **costly_recipes(self._engine.model, best, free[best])}
        recipes = {**free, **priced}
        losses = self.losses(samples, recipes, tick)
        shares = self._shares(samples, priced, max_new_tokens, tick)
        return Choice(cheapest(shares, tolerance), recipes, losses, shares)

    def losses(
        self, samples: Sequence[Question], recipes: Mapping[str, Recipe], tick: Tick
    ) -> dict[str, NDArray[np.float64]]:
        records = self.compared(samples, recipes, tick).records
        return {
            name: np.array([loss_of(record) for record in records if record.mode == name])
            for name in recipes
        }

    def _shares(
        self,
        samples: Sequence[Question],
        recipes: Mapping[str, Recipe],
        max_new_tokens: int,
        tick: Tick,
    ) -> dict[str, float]:
        """Measure the fraction of full mode's answers that each recipe keeps.

        Counts correct answers if there are enough, else tokens that the recipe would also choose.
        """
        report = self.compared(samples, recipes, tick)
        right = self._right(samples, recipes, max_new_tokens)
        full = right.pop(FULL, [])
        if sum(full) < _FEWEST_RIGHT:
            return {name: report[name].agreement.mean for name in recipes}
        return {
            name: sum(a and b for a, b in zip(full, found, strict=True)) / sum(full)
            for name, found in right.items()
        }

    def compared(
        self, samples: Sequence[Question], recipes: Mapping[str, Recipe], tick: Tick
    ) -> FidelityReport:
        rows = [Row(name, recipe) for name, recipe in recipes.items()]
        asked = [_Asked(self._prompt(sample)) for sample in samples]
        noted = {"measured": "repair"}
        return compare_each(asked, rows, self.compare, noted, self._records_path, tick)

    def compare(self, asked: _Asked, rows: Sequence[Row]) -> list[FidelityRecord]:
        """Compare several rows with full mode on one prompt."""
        answer = self._teacher(asked.prompt)
        records = []
        for row in rows:
            logits = self._engine.answer_logits(asked.prompt, answer.ids.tolist(), **row.options)
            per_token = divergence(answer.predictions, logits)
            agrees = logits.argmax(-1) == answer.predictions.to(logits.device).tokens[:, 0]
            records.append(FidelityRecord.of(asked, row, per_token, agrees))
        return records

    def right(
        self, samples: Sequence[Question], chosen: Recipe, max_new_tokens: int, tick: Tick
    ) -> tuple[dict[str, int], int]:
        """Count correct answers in full mode, without a recipe, and with the chosen recipe.

        Returns:
            The counts by name, and the number of samples with reference answers.
        """
        tick(0, 1)
        found = self._right(samples, {"block": Recipe(), "recipe": chosen}, max_new_tokens)
        tick(1, 1)
        return {name: sum(right) for name, right in found.items()}, len(found.get(FULL, []))

    def _right(
        self, samples: Sequence[Question], recipes: Mapping[str, Recipe], max_new_tokens: int
    ) -> dict[str, list[bool]]:
        """Check answers in full mode and with recipes, on the samples with reference answers. Empty
        if there are none."""
        asked = [sample for sample in samples if sample.answers]
        if not asked:
            return {}
        decode = self._engine.model.tokenizer.tokenizer.decode
        prompts = [self._prompt(sample) for sample in asked]
        answers = [self._teacher(prompt).ids.tolist() for prompt in prompts]
        texts = {FULL: [decode(ids, skip_special_tokens=True) for ids in answers]}
        for name, recipe in recipes.items():
            generations = self._engine.generate_batch(
                prompts,
                recipe=recipe,
                max_new_tokens=max_new_tokens,
                batch_size=_GENERATED_AT_ONCE,
            )
            texts[name] = [generation.text for generation in generations]
        return {
            name: [bool(contains_answer(t, s.answers)) for t, s in zip(of, asked, strict=True)]
            for name, of in texts.items()
        }


@dataclass(frozen=True, slots=True)
class _Asked:
    """Prompt with an id derived from its text."""

    prompt: BlockPrompt

    @property
    def id(self) -> str:
        return digest_of([*(block.rendered for block in self.prompt.context), self.prompt.final])

    @property
    def digest(self) -> str:
        return self.id


def loss_of(record: FidelityRecord) -> float:
    """Return the mean divergence, with the first token counted twice, as in training."""
    return (record.kl * record.tokens + record.first_kl) / (record.tokens + 1)


def choose(losses: Losses, in_use: str | None = None) -> str:
    """Choose a recipe by the losses of all candidates without a cost per answer.

    Chooses the first recipe whose loss is at most one standard error above the lowest loss. The
    recipe in use is kept unless the chosen recipe is better by more than the 95 % interval of the
    difference. Standard errors are those of paired differences per question.

    Args:
        losses: Losses on at least two questions.
    """
    best = min(losses, key=lambda name: losses[name].mean())
    chosen = next(name for name in losses if _difference(losses, name, best) <= 1)
    if in_use is not None and not _is_clearly_better(losses, chosen, in_use):
        chosen = in_use
    return chosen


def cheapest(shares: Mapping[str, float], tolerance: float) -> str:
    """Return the cheapest recipe that keeps enough of full mode's answers, else the best one."""
    within = (name for name, share in shares.items() if share >= tolerance)
    return next(within, max(shares, key=lambda name: shares[name]))


def _is_clearly_better(losses: Losses, name: str, other: str) -> bool:
    return len(losses[name]) >= _FEW and _difference(losses, other, name) > _CONFIDENCE


def _difference(losses: Losses, name: str, other: str) -> float:
    """Return how many standard errors the first loss exceeds the second by. 0 if equal."""
    difference = losses[name] - losses[other]
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return float(mean / error) if error else math.copysign(math.inf, mean) if mean else 0.0
