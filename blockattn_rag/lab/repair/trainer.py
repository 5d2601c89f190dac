"""Training of a correction: the student against the teacher, prompt by prompt.

Prompts go through the model one at a time, and gradients are accumulated over a batch. Real batches
would save little: on SmolLM2, four prompts together take 15 % less time, minus the padding of
contexts with unequal lengths. The teacher and the encoding of passages take most of a run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments

from blockattn_rag.lab.repair.student import BlockSource, Student
from blockattn_rag.lab.repair.teacher import Teacher, answer_loss, divergence
from blockattn_rag.lab.trainer import LabTrainer, training_arguments
from blockattn_rag.prompts.blocks import BlockPrompt

Tick = Callable[[int, int], None]

# Settings of the trials on SmolLM2 and Natural Questions whose results are in the guide. They are
# constants, because users cannot choose better values without such trials.
BATCH = 4
LEARNING_RATE = 1e-4
_WARM_UP_SHARE = 0.1
_ADAM_BETA2 = 0.98


class _Course(TrainerCallback):
    """Reports progress, measures after the last step, and stops a training that takes too long."""

    def __init__(self, on_progress: Tick, time_is_up: Callable[[], bool]) -> None:
        self._on_progress, self._time_is_up = on_progress, time_is_up

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._on_progress(state.global_step, state.max_steps)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._on_progress(state.global_step, state.max_steps)
        is_late = self._time_is_up()
        if is_late:
            control.should_training_stop = True
        if is_late or state.global_step >= state.max_steps:
            control.should_evaluate = control.should_save = True


class CorrectionTrainer(LabTrainer):
    """Trains a student on prompts. The result is the state with the lowest loss on other prompts.

    Args:
        student: Student to train.
        teacher: Teacher, which provides the answers.
        source: Source of the blocks of prompts.
        folder: Folder of the checkpoints.
        train: Prompts to train on.
        held: Held-out prompts to measure the loss on.
        max_steps: Number of optimizer steps.
        eval_steps: Steps between measurements. Each measurement saves a checkpoint.
        is_resumed: Whether an interrupted run already measured the state before training.
        on_progress: Called with the number of finished steps and the number of all steps.
        time_is_up: Function that returns whether the training must stop.
    """

    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        source: BlockSource,
        folder: Path,
        train: Sequence[BlockPrompt],
        held: Sequence[BlockPrompt],
        *,
        max_steps: int,
        eval_steps: int,
        is_resumed: bool,
        on_progress: Tick,
        time_is_up: Callable[[], bool],
    ) -> None:
        super().__init__(
            model=student,
            args=_arguments(folder, student, max_steps, eval_steps, is_resumed),
            train_dataset=list(train),
            eval_dataset=list(held),
            data_collator=_alone,
            callbacks=(_Course(on_progress, time_is_up),),
            show_progress=False,
        )
        self.student, self._teacher, self._source, self._held = student, teacher, source, held

    def _load_final(self, checkpoint: Path) -> None:
        # The recorded path is relative to the working directory of the interrupted run.
        best = f"checkpoint-{self.state.best_global_step}"
        self.state.best_model_checkpoint = str(checkpoint.parent / best)
        self._load_best_model()

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Loss of one prompt. The Trainer averages over a batch."""
        return prompt_loss(self.student, self._teacher, self._source, inputs["prompt"])

    @torch.no_grad()
    def measured(self) -> dict[str, float]:
        """Mean loss on the held-out prompts, as ``eval_loss``."""
        losses = [
            prompt_loss(self.student, self._teacher, self._source, prompt).item()
            for prompt in self._held
        ]
        return {"eval_loss": sum(losses) / len(losses)}


def prompt_loss(
    student: Student, teacher: Teacher, source: BlockSource, prompt: BlockPrompt
) -> Tensor:
    """Divergence of the student from the teacher over the teacher's answer to one prompt."""
    answer = teacher(prompt)
    logits = student(source(prompt), answer.ids.tolist())
    return answer_loss(divergence(answer.predictions, logits))


def seconds_of_a_prompt(
    student: Student, teacher: Teacher, source: BlockSource, prompt: BlockPrompt
) -> float:
    """Measure the seconds of a forward and backward pass over a prompt whose blocks are stored."""
    source(prompt)
    started = time.monotonic()
    prompt_loss(student, teacher, source, prompt).backward()
    student.zero_grad(set_to_none=True)
    return time.monotonic() - started


def _alone(batch: Sequence[BlockPrompt]) -> dict[str, BlockPrompt]:
    (prompt,) = batch
    return {"prompt": prompt}


def _arguments(
    folder: Path, student: Student, max_steps: int, eval_steps: int, is_resumed: bool
) -> TrainingArguments:
    arguments = training_arguments(
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=BATCH,
        max_steps=max_steps,
        learning_rate=LEARNING_RATE,
        warmup_steps=round(_WARM_UP_SHARE * max_steps),
        adam_beta2=_ADAM_BETA2,
        eval_strategy="steps",
        eval_steps=eval_steps,
        eval_on_start=not is_resumed,
        save_strategy="steps",
        save_steps=eval_steps,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=max(1, eval_steps // 5),
        disable_tqdm=True,
        seed=0,
        use_cpu=student.model.device.type == "cpu",
    )
    if arguments.n_gpu > 1:
        raise ValueError(
            f"found {arguments.n_gpu} GPUs, expected one: make one visible (CUDA_VISIBLE_DEVICES=0)"
        )
    return arguments
