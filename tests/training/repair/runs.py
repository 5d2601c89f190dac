"""What tests of repair share: a tiny model, questions with passages, settings of a quick run.

As a program it starts a run and kills itself, at the teacher's third answer ("teacher") or at a
step of the training (its number)::

    python -m tests.training.repair.runs OUTPUT STAGE
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import CHAT, Passage
from blockattn_rag.training.repair.config import AdaptConfig
from blockattn_rag.training.repair.questions import Collection
from blockattn_rag.training.repair.samples import Question
from tests.models import tiny_model, tiny_tokenizer

PASSAGES = [Passage(f"t{n}", f"fact {n} is {n * 37 % 11}") for n in range(6)]
QUESTIONS = [
    Question(f"what is {n}?", (PASSAGES[n], *(p for p in PASSAGES if p != PASSAGES[n])))
    for n in range(6)
]
PROMPT = CHAT.prompt("what is 2?", PASSAGES[:3], tiny_tokenizer())


def block_model() -> BlockModel:
    """A tiny Llama whose weights are its own, because runs freeze them."""
    return BlockModel(tiny_model(num_hidden_layers=2), tiny_tokenizer(), name="tiny")


def nearest(text: str, count: int) -> Sequence[Passage]:
    return PASSAGES[:count]


COLLECTION = Collection(PASSAGES, nearest)


def config(output: Path, **changes: Any) -> AdaptConfig:
    """Settings of a run of 6 steps, measured after every second."""
    settings: dict[str, Any] = {
        "samples": 6,
        "max_passages": 3,
        "max_new_tokens": 5,
        "batch_size": 2,
        "epochs": 2.0,
        "eval_steps": 2,
        "warmup_steps": 1,
        "learning_rate": 5e-3,
        "rank": 4,
        "sink": "head:4",
        "prompt_format": "block-attention",
    }
    return AdaptConfig(output, **{**settings, **changes})


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _run_and_die(output: Path, stage: str) -> None:
    from blockattn_rag.training.repair import teacher, trainer
    from blockattn_rag.training.repair.adapt import adapt

    if stage == "teacher":
        compute, batches = teacher.Teacher._compute, iter((None, None, _die))

        def compute_or_die(self: Any, batch: Any) -> Any:
            return (next(batches) or compute)(self, batch)

        teacher._batches = lambda prompts, _: ([ids] for ids in prompts)  # type: ignore[assignment]
        teacher.Teacher._compute = compute_or_die  # type: ignore[method-assign]
    else:
        step, proceed = int(stage), trainer.DistillationTrainer.training_step

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == step:
                _die()
            return proceed(self, *args, **kwargs)

        trainer.DistillationTrainer.training_step = training_step  # type: ignore[method-assign]
    adapt(block_model(), QUESTIONS, config(output))


if __name__ == "__main__":
    _run_and_die(Path(sys.argv[1]), sys.argv[2])
