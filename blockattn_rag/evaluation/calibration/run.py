"""One calibration: choose on one half of the questions, certify on the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from blockattn_rag.engine.calibration import Calibration, prompt_digest, settings_digests
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.engine.results import Certificate
from blockattn_rag.errors import DataError
from blockattn_rag.evaluation.calibration.certify import PLAIN_MODE, certificate
from blockattn_rag.evaluation.calibration.pairs import Pair, Teacher
from blockattn_rag.evaluation.calibration.search import Choice, Losses, search
from blockattn_rag.evaluation.calibration.settings import Setting, Stage
from blockattn_rag.evaluation.fidelity import (
    FLOOR,
    FidelityRecord,
    FidelityReport,
    compare_each,
    compare_modes,
)
from blockattn_rag.evaluation.modes import noted_of

FEWEST_PAIRS = 2
"""Of each half, and of each number of passages; a spread needs two."""

Progress = Callable[[str, int, int], None]
"""Called with what is under way, what is done of it, and all of it."""


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """A calibration and what it rests on.

    Args:
        calibration: the result.
        choice: of the search.
        plain: what plain block mode does on the questions of each certificate.
    """

    calibration: Calibration
    choice: Choice
    plain: Sequence[Certificate]

    @property
    def finalists(self) -> list[tuple[Setting, float, float]]:
        """The settings that were measured on all pairs, best first: mean loss and its standard
        error."""
        found = self.choice.finalists.items()
        rows = [(s, float(x.mean()), float(x.std(ddof=1) / len(x) ** 0.5)) for s, x in found]
        return sorted(rows, key=lambda row: row[1])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        finalists = [
            {"mode": one.mode, "loss": mean, "standard_error": error}
            for one, mean, error in self.finalists
        ]
        return {
            **self.calibration.to_dict(),
            "chosen": self.choice.setting.mode,
            "finalists": finalists,
            "plain": [asdict(one) for one in self.plain],
        }


def calibrate(
    engine: BlockAttentionEngine,
    choose: Sequence[Pair],
    certify: Sequence[Pair],
    stages: Mapping[str, Stage],
    *,
    records_path: Path,
    targets: Mapping[str, float],
    max_new_tokens: int = 24,
    seed: int = 0,
    package_version: str = "",
    noted: Mapping[str, Any] | None = None,
    on_progress: Progress = lambda *_: None,
) -> CalibrationReport:
    """Choose a setting of block mode, and measure what it leaves.

    The loss of a setting on a pair is its mean divergence from full mode along full mode's greedy
    answer, the first token counted twice, because it decides whether there is an answer at all.

    Args:
        engine: the model, and a store that may fill with blocks after several sinks.
        choose: pairs to choose on.
        certify: other pairs, which are certified by their number of passages.
        stages: see ``settings.stages``.
        records_path: every comparison is kept there, and not made again.
        targets: see ``certify.certificate``.
        max_new_tokens: longest answer of full mode.
        noted: what else the comparisons depend on, such as digests of files.

    Raises:
        DataError: too few pairs, the halves share a question, or prompts do not have the same head
            and template; or ``records_path`` holds records of another calibration.
    """
    _check(choose, certify)
    settled = {
        **(noted or {}),
        "measured": "calibration",
        "fingerprint": engine.model.fingerprint,
        **noted_of(engine),
        "prompts": prompt_digest(choose[0].prompt),
        "max_new_tokens": max_new_tokens,
    }
    run = _Run(engine, records_path, settled, Teacher(engine, max_new_tokens), on_progress)
    choice = search(stages, run.measure_on(choose), len(choose), seed=seed)
    plain, certificates = run.certify(certify, choice.setting, targets)
    model = engine.model
    options = GenerateOptions.parse(choice.setting.options, GenerateOptions())
    calibration = Calibration(
        fingerprint=model.fingerprint,
        model=model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        settings=choice.setting.options,
        digests=settings_digests(model, options),
        prompt_digest=prompt_digest(choose[0].prompt),
        chosen_on=len(choose),
        compared=choice.compared,
        stability=choice.stability,
        certificates=certificates,
        targets=dict(targets),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        package_version=package_version,
        namespace=engine.access.namespace,
        kv_dtype=engine.kv_dtype,
    )
    return CalibrationReport(calibration, choice, plain)


def _check(choose: Sequence[Pair], certify: Sequence[Pair]) -> None:
    if min(len(choose), len(certify)) < FEWEST_PAIRS:
        raise DataError(
            f"found {len(choose)} pairs to choose on and {len(certify)} to certify on, expected at "
            f"least {FEWEST_PAIRS} each; give more questions or passages"
        )
    if shared := {pair.question for pair in choose} & {pair.question for pair in certify}:
        raise DataError(f"{len(shared)} questions are in both halves, such as {shared.pop()!r}")
    if len({prompt_digest(pair.prompt) for pair in (*choose, *certify)}) > 1:
        raise DataError("the prompts have different heads or block templates, expected the same")


@dataclass(frozen=True, slots=True)
class _Run:
    """What the comparisons of one calibration have in common."""

    engine: BlockAttentionEngine
    records_path: Path
    noted: Mapping[str, Any]
    teacher: Teacher
    on_progress: Progress

    def measure_on(self, pairs: Sequence[Pair]) -> Callable[[str, Sequence[Setting], int], Losses]:
        """The measure of a search on these pairs."""

        def measure(stage: str, settings: Sequence[Setting], count: int) -> Losses:
            modes = [setting.mode for setting in settings]
            report = self._compare(f"{stage}, {count} questions", pairs[:count], modes)
            losses = np.array([_loss(record) for record in report.records])
            return dict(zip(settings, losses.reshape(len(modes), count), strict=True))

        return measure

    def certify(
        self, pairs: Sequence[Pair], chosen: Setting, targets: Mapping[str, float]
    ) -> tuple[list[Certificate], tuple[Certificate, ...]]:
        """Certificates by number of passages: of plain block mode, and of the chosen setting."""
        modes = list(dict.fromkeys([FLOOR, PLAIN_MODE, chosen.mode]))
        plain, certificates = [], []
        for passages in sorted({pair.passages for pair in pairs}):
            alike = [pair for pair in pairs if pair.passages == passages]
            if len(alike) < FEWEST_PAIRS:
                continue
            report = self._compare(f"certificate, {passages} passages", alike, modes)
            plain.append(certificate(report, PLAIN_MODE, passages, targets))
            seen = sum(not pair.seen_by.isdisjoint(chosen.options.values()) for pair in alike)
            certificates.append(certificate(report, chosen.mode, passages, targets, seen))
        if not certificates:
            raise DataError(
                f"found no number of passages with {FEWEST_PAIRS} pairs or more to certify on; "
                "give more questions"
            )
        return plain, tuple(certificates)

    def _compare(self, what: str, pairs: Sequence[Pair], modes: Sequence[str]) -> FidelityReport:
        def compare(pair: Pair, missing: Sequence[str]) -> list[FidelityRecord]:
            answer, expected = self.teacher(pair)
            return compare_modes(
                self.engine, pair, missing, lambda _: pair.prompt, answer, expected
            )

        def tell(done: int, total: int) -> None:
            self.on_progress(what, done, total)

        return compare_each(pairs, modes, compare, self.noted, self.records_path, tell)


def _loss(record: FidelityRecord) -> float:
    """The mean divergence, with the first token counted twice."""
    return (record.kl * record.tokens + record.first_kl) / (record.tokens + 1)
