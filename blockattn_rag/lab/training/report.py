"""The report of a fine-tuning run, with the model card and the plot of its result."""

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

It is also an ordinary {kind} of transformers.

## Data

| | files | samples | tokens |
|---|---|---:|---:|
| training | {train} |
| evaluation | {evaluation} |

## Settings

| setting | value |
|---|---|
{settings}

## Loss on answers

{table}

Training took {steps} steps; the training loss over the last logged steps was {loss:.4f}. All
values are in `training_log.json`{plot}.
"""


@dataclass(frozen=True, slots=True)
class FinetuneReport:
    """Result of a fine-tuning run.

    Args:
        output: Folder of the result.
        steps: Number of optimizer steps.
        seconds: Wall time of the training in this process.
        loss: Training loss over the last logged steps.
        train, evaluation: Counts of the samples.
        history: Dicts with ``step`` and ``loss`` (training) or ``eval_block_loss``,
            ``eval_full_loss``, in order.
    """

    output: Path
    steps: int
    seconds: float
    loss: float
    train: DataReport
    evaluation: DataReport
    history: list[dict[str, float]]

    @property
    def eval_losses(self) -> dict[str, tuple[float, float]]:
        """Loss on the answers of the evaluation data, before and after training, by mode.

        Empty if there is no evaluation data.
        """
        evaluated = [entry for entry in self.history if "loss" not in entry] or [{}]
        first, last = evaluated[0], evaluated[-1]
        return {
            name.removeprefix("eval_").removesuffix("_loss"): (loss, last[name])
            for name, loss in first.items()
            if name.startswith("eval_")
        }


def write_card(config: FinetuneConfig, report: FinetuneReport, path: Path) -> None:
    """Write the model card: data, settings and losses by mode."""
    library, kind, how = "transformers", "causal language model", "fine-tuned"
    if config.lora:
        library, kind, how = "peft", "LoRA adapter", "trained by LoRA adapters"
    plotted = path.with_name("training_curves.png").is_file()
    settings = {k: v for k, v in config.decisive().items() if k != "model" and v is not None}
    card = _CARD.format(
        base=config.model,
        library=library,
        title=Path(config.output).name,
        how=how,
        modes=" and ".join(config.modes),
        ablated=", without position re-encoding" if config.positions == "composite" else "",
        kind=kind,
        train=_data_cells(config.train_data, report.train),
        evaluation=_data_cells(config.eval_data, report.evaluation),
        settings="\n".join(f"| {name} | {value} |" for name, value in settings.items()),
        table=_loss_table(report),
        steps=report.steps,
        loss=report.loss,
        plot=", drawn in `training_curves.png`" if plotted else "",
    )
    path.write_text(card, encoding="utf-8")


def _data_cells(files: Sequence[str | Path], read: DataReport) -> str:
    names = ", ".join(f"`{Path(file).name}`" for file in files) or "none"
    return f"{names} | {read.samples} | {read.tokens}"


def _loss_table(report: FinetuneReport) -> str:
    if not report.eval_losses:
        return "No evaluation data were given."
    losses = report.eval_losses.items()
    rows = (f"| {mode} | {before:.4f} | {after:.4f} |" for mode, (before, after) in losses)
    return "\n".join(("| mode | before | after |", "|---|---:|---:|", *rows))


def write_plot(history: Sequence[Mapping[str, float]], path: Path) -> None:
    """Plot losses over steps. Does nothing if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    draw_losses(figure.subplots(), history)
    figure.savefig(path, dpi=120)


def draw_losses(axes: Any, history: Sequence[Mapping[str, float]]) -> None:
    """Draw the training loss and each evaluation loss over steps."""
    for key in sorted({k for entry in history for k in entry} - {"step"}):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        label = "training" if key == "loss" else key.removeprefix("eval_").replace("_", " ")
        marker = "" if key == "loss" else "o"
        axes.plot(*zip(*points, strict=True), label=label, marker=marker)
    axes.set(xlabel="optimizer step", ylabel="loss")
    if history:
        axes.legend()
