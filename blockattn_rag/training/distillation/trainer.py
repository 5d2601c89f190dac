"""transformers' Trainer for distillation: the student against the teacher, sample by sample.

Prompts go through the model one at a time, and a batch is reached by accumulation: the rows of one
final block keep a CPU core busy (four together take 15 % less time on SmolLM2, less what contexts
of unequal lengths lose by padding), and most of a run is the teacher and the encoding of passages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments

from blockattn_rag.engine.fetcher import how_encoded
from blockattn_rag.engine.options import NO_CORRECTION
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.training.distillation.config import AdaptConfig
from blockattn_rag.training.distillation.divergence import (
    TopPredictions,
    distillation_loss,
    divergence,
)
from blockattn_rag.training.distillation.student import BlockSource, Student
from blockattn_rag.training.distillation.teacher import Teacher
from blockattn_rag.training.trainer import Watch

History = Sequence[dict[str, float]]
Tick = Callable[[int, int], None]


class Fidelity(NamedTuple):
    """How near to full mode predictions are, along its answers: mean divergence in nats and the
    share of tokens at which the first choices agree; means over tokens, then over prompts."""

    kl: float
    agreement: float


def measure(
    prompts: Sequence[BlockPrompt],
    teacher: Teacher,
    logits_of: Callable[[BlockPrompt, list[int]], Tensor],
    on_progress: Tick = lambda *_: None,
) -> Fidelity:
    """Compare with the teacher what ``logits_of`` predicts, given a prompt and an answer."""
    figures = []
    for number, prompt in enumerate(prompts):
        on_progress(number, len(prompts))
        answer = teacher(prompt)
        logits = logits_of(prompt, answer.ids.tolist())
        expected = on_device(answer.predictions, logits)
        agrees = logits.argmax(-1) == expected.tokens[:, 0]
        figures.append((divergence(expected, logits).mean().item(), agrees.double().mean().item()))
    on_progress(len(prompts), len(prompts))
    return Fidelity(*(sum(column) / len(figures) for column in zip(*figures, strict=True)))


def on_device(predictions: TopPredictions, logits: Tensor) -> TopPredictions:
    return TopPredictions(*(tensor.to(logits.device) for tensor in predictions))


def stale_measurements(history: History) -> int:
    """How many measurements of the held-out prompts came after the best one."""
    found = [entry["eval_kl"] for entry in history if "eval_kl" in entry]
    return len(found) - 1 - found.index(min(found)) if found else 0


class _Course(TrainerCallback):
    """Measures and keeps the last step too, ends where nothing is gained, tells how far it is."""

    def __init__(self, patience: int, on_progress: Tick) -> None:
        self._patience = patience
        self._on_progress = on_progress

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._on_progress(state.global_step, state.max_steps)
        if state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if 0 < self._patience <= stale_measurements(state.log_history):
            control.should_training_stop = True


class DistillationTrainer(Trainer):
    """Trains a student on prompts; measures held-out ones.

    Args:
        student: what is trained.
        teacher: gives the answers to follow.
        source: gives the blocks of prompts.
        config: the settings.
        train, held: prompts.
        is_resumed: the state before training was measured by the interrupted run.
        on_progress: called with steps done and all steps.
    """

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        source: BlockSource,
        config: AdaptConfig,
        train: Sequence[BlockPrompt],
        held: Sequence[BlockPrompt],
        *,
        is_resumed: bool,
        on_progress: Tick,
    ) -> None:
        super().__init__(
            model=student,
            args=_arguments(config, student, is_resumed),
            train_dataset=list(train),
            eval_dataset=list(held),
            data_collator=_alone,
            callbacks=[Watch(), _Course(config.patience, on_progress)],
        )
        self.remove_callback(PrinterCallback)
        self.student, self.teacher, self.source = student, teacher, source
        self.config, self.held = config, held
        # A correction that is trained is applied by the student.
        applied = config.correction if config.fit != "correction" else NO_CORRECTION
        self._how = how_encoded(student.model, config.sink, applied)
        self.fetch_s = 0.0

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end, from ``checkpoint`` if given, and take up the best state measured."""
        if checkpoint is not None:
            state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            is_stale = 0 < self.config.patience <= stale_measurements(state.log_history)
            if state.global_step >= state.max_steps or is_stale:
                self.state = state  # `train` would add one step more
                # The path that is noted is of the interrupted run's working directory.
                best = f"checkpoint-{state.best_global_step}"
                state.best_model_checkpoint = str(checkpoint.parent / best)
                self._load_best_model()
                return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The loss of one prompt; the Trainer takes the mean over a batch."""
        prompt: BlockPrompt = inputs["prompt"]
        answer = self.teacher(prompt)
        logits = self._logits(prompt, answer.ids.tolist())
        loss = distillation_loss(
            on_device(answer.predictions, logits),
            logits,
            answer.ids.to(logits.device),
            first_token_weight=self.config.first_token_weight,
            cross_entropy_weight=self.config.cross_entropy_weight,
        )
        if self.config.fit == "merge":
            loss = loss + self.config.identity_weight * self.student.distance_from_identity()
        return loss

    def _logits(self, prompt: BlockPrompt, answer_ids: list[int]) -> Tensor:
        started = time.monotonic()
        ready = self.source(prompt, self._how)
        self.fetch_s += time.monotonic() - started
        logits: Tensor = self.student(ready, answer_ids)
        return logits

    @torch.no_grad()
    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Measure the held-out prompts, as ``eval_kl`` and ``eval_agreement``."""
        found = measure(self.held, self.teacher, self._logits)
        metrics = {"eval_kl": found.kl, "eval_agreement": found.agreement}
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def _alone(batch: Sequence[BlockPrompt]) -> dict[str, BlockPrompt]:
    (prompt,) = batch
    return {"prompt": prompt}


def _arguments(config: AdaptConfig, student: Student, is_resumed: bool) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(config.work / "checkpoints"),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=config.batch_size,
        num_train_epochs=config.epochs,
        learning_rate=config.peak_learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=config.warmup_steps,
        weight_decay=config.weight_decay,
        adam_beta2=config.adam_beta2,
        max_grad_norm=config.max_grad_norm,
        eval_strategy="steps",
        eval_steps=config.eval_steps,
        eval_on_start=not is_resumed,
        save_strategy="steps",
        save_steps=config.eval_steps,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_kl",
        greater_is_better=False,
        logging_steps=max(1, config.eval_steps // 5),
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        remove_unused_columns=False,
        report_to=[],
        seed=config.seed,
        use_cpu=student.model.device.type == "cpu",
    )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"found {arguments.n_gpu} GPUs, expected one: show this run one of them "
            "(CUDA_VISIBLE_DEVICES=0)"
        )
    return arguments
