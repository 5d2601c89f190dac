"""Trainer for ``train`` and ``repair``: resuming, evaluation, history, and progress."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401 - fails early: the Trainer imports it late
import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from blockattn_rag.errors import DivergedError

logger = logging.getLogger("blockattn_rag")

Loss = Callable[[Any, Mapping[str, Any]], tuple[Tensor, Tensor | int]]
"""Function of a model and a batch, which returns the sum of the losses and their number."""

_REMEDY = "start again with a lower learning rate or more warm-up steps"


def training_arguments(folder: Path, *, batch_size: int, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        logging_nan_inf_filter=False,  # A NaN or infinite loss must end the run.
        save_total_limit=2,
        remove_unused_columns=False,
        report_to=[],
        **settings,
    )


class LabTrainer(Trainer):
    """Trainer that resumes exactly, reports losses, and stops if a loss becomes NaN or infinite.

    Args:
        lengths: Number of tokens of each training item, to group items of similar length in
            batches. Default: batches in random order.
        on_progress: Called with the number of completed steps, and of all steps.
        time_is_up: Checked after each step. If it returns True, training ends.
        settings: Arguments of ``transformers.Trainer``. ``eval_dataset``, a dataset or a dict of
            datasets, is also evaluated after the last step.
    """

    def __init__(
        self,
        *,
        loss: Loss,
        lengths: Sequence[int] | None = None,
        on_progress: Callable[[int, int], None] = lambda *_: None,
        time_is_up: Callable[[], bool] = lambda: False,
        **settings: Any,
    ) -> None:
        watch = _Watch(on_progress, time_is_up, measures=bool(settings.get("eval_dataset")))
        super().__init__(callbacks=[watch], **settings)
        self._loss, self._lengths = loss, lengths
        # The Trainer must not scale losses: compute_loss divides by the batch's number of summands.
        self.model_accepts_loss_kwargs = True
        self.remove_callback(PrinterCallback)

    @property
    def history(self) -> list[dict[str, float]]:
        """All losses in order, as dicts with ``step`` and ``loss`` (training) or ``eval_...``. If a
        resumed run evaluated a step twice, only the later result is included."""
        kept: dict[tuple[float, bool], dict[str, float]] = {}
        for entry in self.state.log_history:
            losses = {k: v for k, v in entry.items() if k == "loss" or k.startswith("eval_")}
            if losses:
                kept[entry["step"], "loss" in entry] = {"step": entry["step"], **losses}
        return list(kept.values())

    def train_from(self, checkpoint: Path | None) -> None:
        """Train from a checkpoint, or from the start. A checkpoint of the last step is only loaded,
        because ``Trainer.train`` would add another step."""
        if checkpoint is None:
            self.train()
            return
        state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if state.global_step < state.max_steps:
            self.train(resume_from_checkpoint=str(checkpoint))
        elif self.args.load_best_model_at_end:
            # The recorded path is relative to the interrupted run's working directory.
            best = checkpoint.with_name(f"checkpoint-{state.best_global_step}")
            state.best_model_checkpoint = str(best)
            self.state = state
            self._load_best_model()
        else:
            self.state = state
            self._load_from_checkpoint(str(checkpoint))

    def check_finite(self) -> None:
        """Raise ``DivergedError`` if a weight is NaN or infinite after training, because no later
        loss would reveal that the last step diverged."""
        model: Any = self.model
        finite = torch.tensor(all(bool(p.isfinite().all()) for p in model.parameters()))
        if not self.accelerator.gather(finite.to(self.args.device)).all():
            raise DivergedError(f"Some of the trained weights are NaN or infinite; {_REMEDY}")

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        total, number = self._loss(model, inputs)
        if num_items_in_batch is None:  # Without labels, the Trainer averages over batches.
            return total / number
        # Gradients are averaged over processes, but summands are counted over all of them.
        return total * self.accelerator.num_processes / num_items_in_batch

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        if self._lengths is None:
            return super()._get_train_sampler(train_dataset)
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(self._lengths, size * self.args.world_size, self.args.seed)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Compute and log the mean loss on the evaluation data: ``eval_loss``, or
        ``eval_<name>_loss`` for each of several datasets."""
        model: Any = self.model
        data = self.eval_dataset
        was_training = model.training
        model.eval()
        if isinstance(data, dict):
            metrics = {f"eval_{name}_loss": self._mean_loss(part) for name, part in data.items()}
        else:
            metrics = {"eval_loss": self._mean_loss(data)}
        model.train(was_training)
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _mean_loss(self, dataset: Any) -> float:
        sums = torch.zeros(2, device=self.args.device)
        for batch in self.get_eval_dataloader(dataset):
            with self.compute_loss_context_manager():
                total, number = self._loss(self.model_wrapped, self._prepare_inputs(batch))
            sums += torch.stack([total, torch.as_tensor(number, device=total.device)])
        loss, number = self.accelerator.reduce(sums, "sum").tolist()
        return float(loss / number)


@dataclass(eq=False)
class _Watch(TrainerCallback):
    """Callback that reports progress, checks the warm-up, and stops diverged or late runs."""

    on_progress: Callable[[int, int], None]
    time_is_up: Callable[[], bool]
    measures: bool

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A resumed run's state still has the interrupted run's intervals.
        state.compute_steps(args, state.max_steps)
        warm_up = args.get_warmup_steps(state.max_steps)
        has_warm_up = args.lr_scheduler_type != "constant" and state.is_world_process_zero
        if has_warm_up and warm_up >= state.max_steps:
            logger.warning(
                "The run has %d steps, but the warm-up has %d: the learning rate of %g is never "
                "reached; use fewer warm-up steps (warmup_steps), smaller batches (batch_size, "
                "--batch-size) or more epochs",
                state.max_steps, warm_up, args.learning_rate,
            )  # fmt: skip
        self.on_progress(state.global_step, state.max_steps)

    def on_log(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        for name, value in settings["logs"].items():
            if name.endswith("loss") and not math.isfinite(value):
                raise DivergedError(f"{name} is {value} at step {state.global_step}; {_REMEDY}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.on_progress(state.global_step, state.max_steps)
        is_late = self.time_is_up()
        if is_late:
            control.should_training_stop = True
        if is_late or state.global_step >= state.max_steps:
            # The last step may not be a multiple of `logging_steps`, `save_steps` or `eval_steps`.
            control.should_log = control.should_save = True
            control.should_evaluate = self.measures


@dataclass(eq=False)
class LengthGroupedSampler(Sampler[int]):
    """Sampler that groups items of similar length, in an order that depends only on seed and epoch.
    Transformers' sampler would use a different order in a resumed run."""

    lengths: Sequence[int]
    batch_size: int
    seed: int
    epoch: int = field(default=0, init=False)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size, pool = self.batch_size, 50 * self.batch_size  # Each pool is sorted by length.
        groups: list[list[int]] = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lambda i: -self.lengths[i])
            groups += (near[i : i + size] for i in range(0, len(near), size))
        # An incomplete group comes last. Otherwise, later groups would be split across batches.
        full = len(groups) - (len(groups[-1]) < size)
        shuffled = torch.randperm(full, generator=generator).tolist()
        for i in [*shuffled, *range(full, len(groups))]:
            yield from groups[i]
