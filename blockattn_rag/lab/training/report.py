"""Report of a fine-tuning run, with the model card and a plot of the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.data import DataReport

_CARD = """\
---
base_model: {base}
library_name: {library}
tags:
- block-attention
- rag
---

# {title}

`{base}`, {how} for Block-Attention with `blockattn_rag`: every sample in {modes} mode{ablated}.

## Use

```python
from blockattn_rag import BlockAttentionEngine

engine = BlockAttentionEngine.from_pretrained("{title}")
```

It is also an ordinary transformers {kind}.

## Training

{samples} samples of {tokens} tokens, {steps} steps. Training loss over the last logged steps:
{loss:.4f}.{evaluation} All losses are in `training_log.json`.

| setting | value |
|---|---|
{settings}
"""


@dataclass(frozen=True, slots=True)
class FinetuneReport:
    """Output folder, duration, counts and losses of a completed fine-tuning run."""

    output: Path
    steps: int
    seconds: float
    loss: float
    train: DataReport
    history: list[dict[str, float]]

    @property
    def eval_losses(self) -> dict[str, tuple[float, float]]:
        """Loss on the evaluation data before and after training, by mode. Empty without data."""
        evaluated = [entry for entry in self.history if "loss" not in entry] or [{}]
        first, last = evaluated[0], evaluated[-1]
        return {
            name.removeprefix("eval_").removesuffix("_loss"): (loss, last[name])
            for name, loss in first.items()
            if name.startswith("eval_")
        }

    @property
    def evaluation_text(self) -> str:
        losses = (
            f"{mode} mode {before:.4f} before, {after:.4f} after"
            for mode, (before, after) in self.eval_losses.items()
        )
        return f"Loss on the evaluation data: {'; '.join(losses)}."


def write_card(config: FinetuneConfig, report: FinetuneReport, path: Path) -> None:
    library, kind, how = "transformers", "causal language model", "fine-tuned"
    if config.lora:
        library, kind, how = "peft", "LoRA adapter", "trained by LoRA adapters"
    settings = {k: v for k, v in config.decisive().items() if k != "model" and v is not None}
    card = _CARD.format(
        base=config.model,
        library=library,
        title=Path(config.output).name,
        how=how,
        modes=" and ".join(config.modes),
        ablated=", without position re-encoding" if config.positions == "composite" else "",
        kind=kind,
        samples=report.train.samples,
        tokens=report.train.tokens,
        steps=report.steps,
        loss=report.loss,
        evaluation=f" {report.evaluation_text}" if report.eval_losses else "",
        settings="\n".join(f"| {name} | {value} |" for name, value in settings.items()),
    )
    path.write_text(card, encoding="utf-8")


def write_plot(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot losses by step. Does nothing if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw_losses(figure.subplots(), history)
    figure.savefig(path, dpi=120)


def draw_losses(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    for key in sorted({k for entry in history for k in entry} - {"step"}):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        label = "training" if key == "loss" else key.removeprefix("eval_").replace("_", " ")
        marker = "" if key == "loss" else "o"
        axes.plot(*zip(*points, strict=True), label=label, marker=marker)
    axes.set(xlabel="optimizer step", ylabel="loss")
    if history:
        axes.legend()
