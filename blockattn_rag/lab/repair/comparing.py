"""The candidates of a repair, and how they are compared with full mode."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.evaluation.fidelity import FidelityRecord, FidelityReport, compare_each
from blockattn_rag.lab.evaluation.metrics import contains_answer
from blockattn_rag.lab.evaluation.rows import FULL, PLAIN, Row
from blockattn_rag.lab.repair.choice import loss_of
from blockattn_rag.lab.repair.divergence import divergence
from blockattn_rag.lab.repair.samples import Sample
from blockattn_rag.lab.repair.teacher import Teacher
from blockattn_rag.lab.repair.trainer import on_device
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import Correction
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.sinks import NO_SINK

Tick = Callable[[int, int], None]
"""Called with what is done, and all of it."""

_GENERATED_AT_ONCE = 8


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


def promoting(
    model: BlockModel, free: Mapping[str, Recipe], losses: Mapping[str, NDArray[np.float64]]
) -> dict[str, Recipe]:
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
    """Compares recipes with full mode's answers, whose predictions the teacher keeps.

    Args:
        engine: The model, over a store that has or takes the passages.
        teacher: Gives full mode's answers.
        prompt: Makes the prompt of a sample.
        records_path: File of comparisons. What it holds is not compared again.
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
        return compare_each(asked, rows, self._compare, noted, self._records_path, tick)

    def _compare(self, asked: _Asked, rows: Sequence[Row]) -> list[FidelityRecord]:
        answer = self._teacher(asked.prompt)
        records = []
        for row in rows:
            logits = self._engine.answer_logits(asked.prompt, answer.ids.tolist(), **row.options)
            expected = on_device(answer.predictions, logits)
            per_token = divergence(expected, logits).clamp_min(0)
            agrees = (logits.argmax(-1) == expected.tokens[:, 0]).double()
            records.append(
                FidelityRecord(
                    id=asked.id,
                    digest=asked.digest,
                    mode=row.name,
                    tokens=len(per_token),
                    kl=float(per_token.mean()),
                    first_kl=float(per_token[0]),
                    agreement=float(agrees.mean()),
                    recipe=row.digest,
                )
            )
        return records

    def right(
        self, samples: Sequence[Sample], chosen: Recipe, max_new_tokens: int, tick: Tick
    ) -> tuple[dict[str, int], int]:
        """Right answers in full mode, without a recipe and with the chosen one; and of how many
        samples that have right answers."""
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
        parts = [block.rendered for block in self.prompt.context]
        told = json.dumps([*parts, self.prompt.final]).encode()
        return hashlib.sha256(told).hexdigest()[:16]

    @property
    def digest(self) -> str:
        return self.id
