"""The candidates of a repair, their comparison with full mode, and the choice of one.

The choice follows the one-standard-error rule (Breiman et al. 1984): the simplest setting that the
data cannot distinguish from the best one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.evaluation.datasets import digest_of
from blockattn_rag.lab.evaluation.fidelity import FidelityRecord, FidelityReport, compare_each
from blockattn_rag.lab.evaluation.metrics import contains_answer
from blockattn_rag.lab.evaluation.records import FULL, PLAIN, Row
from blockattn_rag.lab.repair.data import Sample
from blockattn_rag.lab.repair.teacher import Teacher, divergence
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.sinks import NO_SINK

Tick = Callable[[int, int], None]
"""Called with what is done, and all of it."""

_GENERATED_AT_ONCE = 8

_CONFIDENCE = 1.96
"""Standard errors by which a recipe has to be better to cost tokens, or to replace another one."""

_FEW = 8
"""Questions below which the spread of a difference is too uncertain to replace a recipe in use."""

Losses = Mapping[str, NDArray[np.float64]]
"""Losses of recipes on the same questions, ``[questions]``, by name; the simplest recipe first."""

IN_USE = "in use"
"""Name of the candidate that the model has run with so far."""


def free_recipes(
    model: BlockModel,
    sink: str,
    closed: Correction,
    trained: Correction | None,
    in_use: Recipe | None = None,
) -> dict[str, Recipe]:
    """The candidates that cost nothing per answer, by name, the simplest first.

    A recipe in use comes before new adapters, and is one of the candidates.
    """
    prefix = "" if sink == NO_SINK else f"{sink} + "
    found = {PLAIN: Recipe()}
    if sink != NO_SINK:
        found[sink] = Recipe(sink)
    if in_use is not None:
        found[IN_USE] = in_use
    fitted = {"closed form": closed} | ({"trained": trained} if trained is not None else {})
    for name, adapter in fitted.items():
        found[prefix + name] = Recipe(sink, adapter, fingerprints=(model.fingerprint,))
    return found


def promoting(model: BlockModel, free: Mapping[str, Recipe], losses: Losses) -> dict[str, Recipe]:
    """The best of the candidates with one passage promoted; empty if the model cannot promote."""
    if not model.supports_relay:
        return {}
    best = min(free, key=lambda name: losses[name].mean())
    one = free[best]
    if one.promote:
        return {}
    promoted = Recipe(one.sink, one.adapter, 1, fingerprints=one.fingerprints)
    return {f"{best} + promote 1": promoted}


class Comparer:
    """Compares recipes with full mode along the teacher's answers.

    Args:
        engine: The model, over a store that has or takes the passages.
        teacher: Gives full mode's answers.
        prompt: Makes the prompt of a sample.
        records_path: File of records. Recorded comparisons are not computed again.
    """

    def __init__(
        self,
        engine: BlockAttentionEngine,
        teacher: Teacher,
        prompt: Callable[[Sample], BlockPrompt],
        records_path: Path,
    ) -> None:
        self._engine, self._teacher, self._prompt = engine, teacher, prompt
        self._records_path = records_path

    def losses(
        self, samples: Sequence[Sample], recipes: Mapping[str, Recipe], tick: Tick
    ) -> dict[str, NDArray[np.float64]]:
        """Losses on the samples, by recipe, in the recipes' order."""
        records = self.compared(samples, recipes, tick).records
        return {
            name: np.array([loss_of(record) for record in records if record.mode == name])
            for name in recipes
        }

    def compared(
        self, samples: Sequence[Sample], recipes: Mapping[str, Recipe], tick: Tick
    ) -> FidelityReport:
        """Every recipe on the samples."""
        rows = [Row(name, recipe) for name, recipe in recipes.items()]
        asked = [_Asked(self._prompt(sample)) for sample in samples]
        noted = {"measured": "repair"}
        return compare_each(asked, rows, self.compare, noted, self._records_path, tick)

    def compare(self, asked: _Asked, rows: Sequence[Row]) -> list[FidelityRecord]:
        """The records of one prompt in several rows."""
        answer = self._teacher(asked.prompt)
        records = []
        for row in rows:
            logits = self._engine.answer_logits(asked.prompt, answer.ids.tolist(), **row.options)
            per_token = divergence(answer.predictions, logits)
            agrees = logits.argmax(-1) == answer.predictions.to(logits.device).tokens[:, 0]
            records.append(FidelityRecord.of(asked, row, per_token, agrees))
        return records

    def right(
        self, samples: Sequence[Sample], chosen: Recipe, max_new_tokens: int, tick: Tick
    ) -> tuple[dict[str, int], int]:
        """Count right answers in full mode, without a recipe and with the chosen one.

        Returns:
            The counts by name, and the number of samples whose right answers are known.
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
            given = self._engine.generate_batch(
                prompts,
                recipe=recipe,
                max_new_tokens=max_new_tokens,
                batch_size=_GENERATED_AT_ONCE,
            )
            texts[name] = [one.text for one in given]
        tick(2, 2)
        right = {
            name: sum(int(contains_answer(t, s.answers)) for t, s in zip(of, asked, strict=True))
            for name, of in texts.items()
        }
        return right, len(asked)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt, named by its text."""

    prompt: BlockPrompt

    @property
    def id(self) -> str:
        return digest_of([*(block.rendered for block in self.prompt.context), self.prompt.final])

    @property
    def digest(self) -> str:
        return self.id


def loss_of(record: FidelityRecord) -> float:
    """The mean divergence, with the first token counted twice, as in the fit."""
    return (record.kl * record.tokens + record.first_kl) / (record.tokens + 1)


def choose(losses: Losses, costly: Collection[str] = (), in_use: str | None = None) -> str:
    """The simplest free recipe, unless the one in use is as good or a costly one clearly better.

    The simplest free recipe is the first whose loss is at most one standard error above the lowest
    one of these. "Clearly better" is a loss that is lower by more than the 95 % interval of the
    difference. Standard errors are those of differences, paired by question.

    Args:
        losses: On at least two questions.
        costly: Names of recipes that compute tokens in every answer. At least one is not costly.
        in_use: Name of the recipe in use, if any, which is kept unless another is clearly better.
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
    """By how many standard errors the first loss is above the second; 0 if they are equal."""
    difference = losses[name] - losses[other]
    mean, error = difference.mean(), difference.std(ddof=1) / math.sqrt(len(difference))
    return float(mean / error) if error else math.copysign(math.inf, mean) if mean else 0.0
