"""What a distillation run did: as a report, and as the model card of its result."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from blockattn_rag.training.correction import RIDGES, FitReport
from blockattn_rag.training.distillation.config import AdaptConfig, Fit
from blockattn_rag.training.distillation.trainer import Fidelity

MERGE_FILE = "merge.safetensors"
CORRECTION_FILE = "correction.safetensors"

_CARD = """\
---
base_model: {base}
library_name: {library}
tags:
- block-attention
- rag
---

# {title}

{what} of `{base}` for block mode, made with `blockattn_rag`.
{how}
Made without labels: the teacher is `{base}` in full mode.

## Use

```python
from blockattn_rag import BlockAttentionEngine

engine = BlockAttentionEngine.from_pretrained("{base}", {use})
```

## Held-out questions

{held} prompts that were not trained on, compared with full mode along full mode's greedy answers.
KL is in nats and counts the {top_k} likeliest tokens and all others as one, so it is at most that
of the whole vocabulary; agreement is the share of tokens at which the first choices are the same.

| mode | KL | agreement |
|---|---:|---:|
{rows}

{verdict}{note}

## Data

{data}

## Settings

| setting | value |
|---|---|
{settings}

Fingerprint of the base: `{fingerprint}`. {versions}.
"""

_STOCK = (
    "The passages' keys and values stay the base model's own, so one store serves answers with\n"
    "and without it."
)
_HOW = {
    "reader": (
        "Reader adapter",
        "A LoRA adapter that acts while the final block and the answer are computed, and not on\n"
        f"passages. {_STOCK}",
    ),
    "merge": (
        "Learned merge",
        "Weights per layer and head by which attention to passages is merged with the rest; no\n"
        f"weight of the model is changed. {_STOCK}",
    ),
    "correction": (
        "Correction",
        "A linear map, per layer and key-value head, that moves passages' keys and values towards\n"
        "those of full attention when they are encoded. It costs nothing per answer.",
    ),
}
_PACKAGES = ("blockattn_rag", "torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class AdaptReport:
    """What a run did.

    Args:
        output: the finished folder.
        base: the model, as it was named.
        fingerprint: of the base's blocks.
        steps: optimizer steps taken; ``best_step``: that of the result.
        train_samples, held_samples: prompts trained on and held out.
        questions: distinct questions; ``tried``: passages that the model was asked to write one
            about, or None where questions were given.
        block: held-out figures of block mode with each block alone; ``before``: with the sink and
            merge of the settings, untrained; ``after``: of the result.
        history: dicts with ``step`` and ``loss`` (training) or ``eval_kl``, ``eval_agreement``.
        correction: how well a correction fits the held-out prompts; it takes no steps.
        seconds: wall time of this process by stage; ``fetching``, part of ``training``, is what
            getting passages' keys and values took.
    """

    output: Path
    base: str
    fingerprint: str
    steps: int
    best_step: int
    train_samples: int
    held_samples: int
    questions: int
    tried: int | None
    block: Fidelity
    before: Fidelity
    after: Fidelity
    history: list[dict[str, float]]
    seconds: dict[str, float]
    correction: FitReport | None = None

    @property
    def improved(self) -> bool:
        """Whether the held-out divergence fell."""
        return self.after.kl < self.before.kl

    @property
    def rows(self) -> list[tuple[str, Fidelity]]:
        """The held-out figures, named."""
        after = f"after {self.best_step} of {self.steps} steps"
        return [
            ("block mode, each block alone", self.block),
            ("before, with the settings below", self.before),
            ("corrected" if self.correction else after, self.after),
        ]

    @property
    def note(self) -> str:
        """What to know of the figures."""
        if self.correction is None:
            return (
                "The best of the measured states was kept, so the last row is slightly flattered. "
                "All measurements are in `training_log.json`."
            )
        keys, values = self.correction.keys_explained, self.correction.values_explained
        return (
            f"It takes away {_mean_percent(keys)} of the squared difference of keys and "
            f"{_mean_percent(values)} of that of values, the mean over layers. The held-out "
            f"prompts chose the penalty of the fit, {self.correction.ridge:g} of "
            f"{len(RIDGES)} tried."
        )

    @property
    def data(self) -> str:
        """How questions came about, and how many there are."""
        source = "given"
        if self.tried is not None:
            source = f"written by the model from {self.tried} passages"
        return (
            f"{self.train_samples} samples to train on and {self.held_samples} held out, of "
            f"{self.questions} distinct questions, {source}."
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        for name in ("block", "before", "after"):
            figures[name] = figures[name]._asdict()
        figures["correction"] = self.correction and asdict(self.correction)
        return {**figures, "output": str(self.output), "improved": self.improved}


def _mean_percent(shares: Sequence[float]) -> str:
    return f"{100 * sum(shares) / len(shares):.0f} %"


def result_in(folder: str, fit: Fit) -> str:
    """What to name where the result is used."""
    files = {"merge": f"/{MERGE_FILE}", "correction": f"/{CORRECTION_FILE}"}
    return f"{folder}{files.get(fit, '')}"


def write_card(config: AdaptConfig, report: AdaptReport, path: Path) -> None:
    """Write the model card."""
    what, how = _HOW[config.fit]
    title, base = Path(config.output).name, report.base
    use: dict[str, str] = {config.fit: result_in(title, config.fit)}
    names = [name for name in ("sink", "correction", "merge") if name != config.fit]
    use |= {name: value for name in names if (value := getattr(config, name)) != "none"}
    settings = {k: v for k, v in config.decisive().items() if v is not None}
    card = _CARD.format(
        base=base,
        library="peft" if config.fit == "reader" else "blockattn_rag",
        title=title,
        what=what,
        how=how,
        use=", ".join(f'{name}="{value}"' for name, value in use.items()),
        held=report.held_samples,
        top_k=config.top_k,
        rows="\n".join(f"| {n} | {f.kl:.4f} | {100 * f.agreement:.1f} % |" for n, f in report.rows),
        verdict="" if report.improved else "**The divergence did not fall: do not use this.** ",
        note=report.note,
        data=report.data,
        settings="\n".join(f"| {name} | {value} |" for name, value in settings.items()),
        fingerprint=report.fingerprint,
        versions=", ".join(f"{name} {_version(name)}" for name in _PACKAGES)
        + f", Python {platform.python_version()}",
    )
    path.write_text(card, encoding="utf-8")


def _version(package: str) -> str:
    from blockattn_rag import __version__

    return __version__ if package == "blockattn_rag" else version(package)
