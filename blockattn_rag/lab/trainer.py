"""Subclass of transformers' Trainer for ``train`` and ``repair``: resuming, evaluation, history."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from pathlib import Path
from typing import Any

from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)

from blockattn_rag.errors import DivergedError

logger = logging.getLogger("blockattn_rag")

REMEDY = (
    "start again (overwrite=True, --overwrite) with a lower learning rate or more warm-up steps"
)

_ALL_WARM_UP = (
    "the run has %d steps and the warm-up has %d: the learning rate of %g is not reached; "
    "use fewer warm-up steps (warmup_steps), smaller batches (batch_size, --batch-size) or more "
    "epochs"
)


def training_arguments(folder: Path, **settings: Any) -> TrainingArguments:
    """Create the settings of the Trainer: settings that all runs share, and the given settings.

    Args:
        folder: Folder of the checkpoints.
        settings: Further arguments of ``TrainingArguments``.
    """
    return TrainingArguments(
        output_dir=str(folder),
        logging_nan_inf_filter=False,  # a loss that is not finite must end the run
        save_total_limit=2,
        remove_unused_columns=False,
        report_to=[],
        **settings,
    )


class LabTrainer(Trainer):
    """Trainer that resumes exactly, reports losses, and stops when they are not finite.

    Args:
        callbacks: Further callbacks.
        show_progress: Whether to print losses.
        settings: Arguments of ``transformers.Trainer``.
    """

    def __init__(
        self, *, callbacks: tuple[TrainerCallback, ...] = (), show_progress: bool, **settings: Any
    ) -> None:
        super().__init__(callbacks=[_Watch(), *callbacks], **settings)
        if not show_progress:
            self.remove_callback(PrinterCallback)

    @property
    def history(self) -> list[dict[str, float]]:
        """Losses in order, as dicts with ``step`` and ``loss`` (training) or ``eval_...``.

        If a resumed run measured a step twice, only the later measurement is included.
        """
        kept: dict[tuple[float, bool], dict[str, float]] = {}
        for entry in self.state.log_history:
            losses = {k: v for k, v in entry.items() if k == "loss" or k.startswith("eval_")}
            if losses:
                kept[entry["step"], "loss" in entry] = {"step": entry["step"], **losses}
        return list(kept.values())

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end, from ``checkpoint`` if given.

        A checkpoint of the last step is loaded without training, because ``Trainer.train`` would
        add another step.
        """
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            if state.global_step >= state.max_steps:
                self.state = state
                self._load_final(checkpoint)
                return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def _load_final(self, checkpoint: Path) -> None:
        self._load_from_checkpoint(str(checkpoint))

    @abstractmethod
    def measured(self) -> dict[str, float]:
        """Measure the losses on the evaluation data, named ``eval_...``."""

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure and log the evaluation losses. Called by the Trainer."""
        metrics = self.measured()
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


class _Watch(TrainerCallback):
    """Warns if a run ends during warm-up, stops on divergence, and logs the last step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The state of a resumed run still has the intervals of the interrupted run.
        state.compute_steps(args, state.max_steps)
        warm_up = args.get_warmup_steps(state.max_steps)
        has_warm_up = args.lr_scheduler_type != "constant" and state.is_world_process_zero
        if has_warm_up and warm_up >= state.max_steps:
            logger.warning(_ALL_WARM_UP, state.max_steps, warm_up, args.learning_rate)

    def on_log(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        for name, value in found["logs"].items():
            if name.endswith("loss") and not math.isfinite(value):
                raise DivergedError(f"{name} is {value} at step {state.global_step}; {REMEDY}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The Trainer itself logs only every `logging_steps`-th step.
        if state.global_step >= state.max_steps:
            control.should_log = True
