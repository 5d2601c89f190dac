"""Candidate recipes of a repair: their comparison with full mode, and the choice of one.

The choice follows the one-standard-error rule (Breiman et al. 1984): it is the simplest candidate
that the data cannot distinguish from the best candidate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
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
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.sinks import NO_SINK

Tick = Callable[[int, int], None]
"""Function of the finished part of the work and its total."""

_GENERATED_AT_ONCE = 8

_CONFIDENCE = 1.96
"""Standard errors by which a recipe that costs tokens, or that replaces another, must be better."""

_FEW = 8
"""Number of questions below which a difference is too uncertain to replace a recipe in use."""

Losses = Mapping[str, NDArray[np.float64]]
"""Losses of recipes on the same questions, ``[questions]``, by name; the simplest recipe first."""

IN_USE = "in use"
"""Name of the candidate that is the model's current recipe."""


def free_recipes(
    model: BlockModel,
    sink: str,
    closed: Correction,
    trained: Correction | None,
    in_use: Recipe | None = None,
) -> dict[str, Recipe]:
    """Candidates that cost nothing per answer, by name, the simplest first.

    A recipe in use is also a candidate, and comes before new adapters.
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


def count_candidates(sink: str, in_use: Recipe | None) -> int:
    """Maximum number of candidates: those of ``free_recipes`` and ``promoting``."""
    without, closed, trained, promoted = 1, 1, 1, 1
    has_sink, has_in_use = sink != NO_SINK, in_use is not None
    return without + has_sink + has_in_use + closed + trained + promoted


def promoting(free: Mapping[str, Recipe], losses: Losses) -> dict[str, Recipe]:
    """The best candidate with one promoted passage. Empty if it promotes already."""
    best = min(free, key=lambda name: losses[name].mean())
    recipe = free[best]
    if recipe.promote:
        return {}
    return {f"{best} + promote 1": replace(recipe, promote=1)}


class Comparer:
    """Compares recipes with full mode, at each token of the teacher's answers.

    Args:
        engine: Engine whose store contains the passages, or can store them.
        teacher: Provides full mode's answers.
        prompt: Function that makes the prompt of a sample.
        records_path: File of records. Recorded comparisons are not computed again.
    """

    def __init__(
        self,
        engine: BlockAttentionEngine,
        teacher: Teacher,
        prompt: Callable[[Question], BlockPrompt],
        records_path: Path,
    ) -> None:
        self._engine, self._teacher, self._prompt = engine, teacher, prompt
        self._records_path = records_path

    def losses(
        self, samples: Sequence[Question], recipes: Mapping[str, Recipe], tick: Tick
    ) -> dict[str, NDArray[np.float64]]:
        """Losses on the samples by recipe, in the order of the recipes."""
        records = self.compared(samples, recipes, tick).records
        return {
            name: np.array([loss_of(record) for record in records if record.mode == name])
            for name in recipes
        }

    def compared(
        self, samples: Sequence[Question], recipes: Mapping[str, Recipe], tick: Tick
    ) -> FidelityReport:
        """Compare every recipe with full mode on the samples."""
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
        """Count right answers in full mode, without a recipe, and with the chosen recipe.

        Returns:
            The counts by name, and the number of samples with known right answers.
        """
        asked = [sample for sample in samples if sample.answers]
        if not asked:
            return {}, 0
        decode = self._engine.model.tokenizer.tokenizer.decode
        prompts = [self._prompt(sample) for sample in asked]
        answers = [self._teacher(prompt).ids.tolist() for prompt in prompts]
        texts = {FULL: [decode(ids, skip_special_tokens=True) for ids in answers]}
        for number, (name, recipe) in enumerate((("block", Recipe()), ("recipe", chosen))):
            tick(number, 2)
            generations = self._engine.generate_batch(
                prompts,
                recipe=recipe,
                max_new_tokens=max_new_tokens,
                batch_size=_GENERATED_AT_ONCE,
            )
            texts[name] = [generation.text for generation in generations]
        tick(2, 2)
        right = {
            name: sum(int(contains_answer(t, s.answers)) for t, s in zip(of, asked, strict=True))
            for name, of in texts.items()
        }
        return right, len(asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt whose id is derived from its text."""

    prompt: BlockPrompt

    @property
    def id(self) -> str:
        return digest_of([*(block.rendered for block in self.prompt.context), self.prompt.final])

    @property
    def digest(self) -> str:
        return self.id


def loss_of(record: FidelityRecord) -> float:
    """Mean divergence, with the first token counted twice, as in training."""
    return (record.kl * record.tokens + record.first_kl) / (record.tokens + 1)


def choose(losses: Losses, costly: Collection[str] = (), in_use: str | None = None) -> str:
    """Choose a recipe by the losses of all candidates.

    The default choice is the simplest good recipe among the free (not costly) ones: the first whose
    loss is at most one standard error above their lowest loss. The recipe in use is kept unless the
    choice is clearly better. A costly recipe is chosen only if it is clearly better. "Clearly
    better" means a loss that is lower by more than the 95 % interval of the difference. Standard
    errors are of differences, paired by question.

    Args:
        losses: Losses on at least two questions.
        costly: Names of recipes that compute tokens in every answer. At least one recipe must not
            be costly.
        in_use: Name of the recipe in use, if any.
    """
    free = [name for name in losses if name not in costly]
    best = min(free, key=lambda name: losses[name].mean())
    chosen = next(name for name in free if _difference(losses, name, best) <= 1)
    if in_use is not None and not _is_clearly_better(losses, chosen, in_use):
        chosen = in_use
    better = (name for name in losses if _is_clearly_better(losses, name, chosen))
    return next((name for name in better if name in costly), chosen)


def _is_clearly_better(losses: Losses, name: str, other: str) -> bool:
    return len(losses[name]) >= _FEW and _difference(losses, other, name) > _CONFIDENCE


def _difference(losses: Losses, name: str, other: str) -> float:
    """Number of standard errors by which the first loss exceeds the second. 0 if they are equal."""
    difference = losses[name] - losses[other]
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return float(mean / error) if error else math.copysign(math.inf, mean) if mean else 0.0
