"""What a fine-tuning run did: as a report, and as the model card and the plot of its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from blockattn_rag.training.config import FinetuneConfig
from blockattn_rag.training.data import DataReport

_CARD = """\
---
base_model: {base}
library_name: {library}
tags:
- block-attention
- rag
---

# {title}

`{base}`, {how} for Block-Attention with `blockattn_rag`{modes}.

## Use

```python
from blockattn_rag import BlockAttentionEngine

engine = BlockAttentionEngine.from_pretrained("{title}")
```

It is also an ordinary {kind} of transformers.

## Data

{data}

## Settings

{settings}

## Loss on answers

{table}

Training took {steps} steps; the training loss over the last logged steps was {loss:.4f}. All
values are in `training_log.json`{plot}.
"""


@dataclass(frozen=True, slots=True)
class FinetuneReport:
    """What a run did.

    Args:
        output: the finished folder.
        steps: optimizer steps; ``seconds``: wall time of this process's part of the training.
        loss: training loss over the last logged steps.
        train, evaluation: what was read, and which lines were left out.
        history: dicts with ``step`` and ``loss`` (training) or ``eval_block_loss``,
            ``eval_full_loss``, in order.
    """

    output: Path
    steps: int
    seconds: float
    loss: float
    train: DataReport
    evaluation: DataReport
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def eval_losses(self) -> dict[str, tuple[float, float]]:
        """By mode, the loss on the answers of the evaluation data before and after training; empty
        where no such data were given."""
        evaluated = [entry for entry in self.history if "loss" not in entry]
        if not evaluated:
            return {}
        first, last = evaluated[0], evaluated[-1]
        names = [key for key in first if key.startswith("eval_")]
        return {
            name.removeprefix("eval_").removesuffix("_loss"): (first[name], last[name])
            for name in names
        }


def write_card(config: FinetuneConfig, report: FinetuneReport, path: Path) -> None:
    """Write the model card: data, settings and losses by mode."""
    plotted = path.with_name("training_curves.png").is_file()
    path.write_text(
        _CARD.format(
            base=config.model,
            library="peft" if config.lora else "transformers",
            title=Path(config.output).name,
            how="trained by LoRA adapters" if config.lora else "fine-tuned",
            modes=_modes(config),
            kind="LoRA adapter" if config.lora else "causal language model",
            data=_data(config, report),
            settings=_settings(config),
            table=_table(report),
            steps=report.steps,
            loss=report.loss,
            plot=", drawn in `training_curves.png`" if plotted else "",
        ),
        encoding="utf-8",
    )


def _modes(config: FinetuneConfig) -> str:
    where = " and ".join(config.modes)
    ablated = ", without position re-encoding" if config.positions == "composite" else ""
    return f": every sample in {where} mode{ablated}"


def _data(config: FinetuneConfig, report: FinetuneReport) -> str:
    rows = ["| | files | samples | tokens | lines left out |", "|---|---|---:|---:|---:|"]
    for name, files, read in (
        ("training", config.train_data, report.train),
        ("evaluation", config.eval_data, report.evaluation),
    ):
        names = ", ".join(f"`{Path(f).name}`" for f in files) or "none"
        rows.append(f"| {name} | {names} | {read.samples} | {read.tokens} | {len(read.skipped)} |")
    return "\n".join(rows)


def _settings(config: FinetuneConfig) -> str:
    shown = {k: v for k, v in config.decisive().items() if k != "model" and v is not None}
    return "\n".join(
        ["| setting | value |", "|---|---|", *(f"| {k} | {v} |" for k, v in shown.items())]
    )


def _table(report: FinetuneReport) -> str:
    if not report.eval_losses:
        return "No evaluation data were given."
    rows = ["| mode | before | after |", "|---|---:|---:|"]
    for mode, (before, after) in report.eval_losses.items():
        rows.append(f"| {mode} | {before:.4f} | {after:.4f} |")
    return "\n".join(rows)


def write_plot(history: list[dict[str, float]], path: Path) -> None:
    """Draw training and evaluation losses over steps; nothing where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key in sorted({k for entry in history for k in entry} - {"step"}):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        label = "training" if key == "loss" else key.removeprefix("eval_").replace("_", " ")
        marker = "" if key == "loss" else "o"
        axes.plot(*zip(*points, strict=True), label=label, marker=marker)
    axes.set(xlabel="optimizer step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=120)
