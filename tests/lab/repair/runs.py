"""Shared by the repair tests: a tiny model, questions with passages, and limits for quick runs."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.repair.compare import Comparer
from blockattn_rag.lab.repair.data import Material, Question
from blockattn_rag.lab.repair.plan import LIMITS, Speeds
from blockattn_rag.lab.repair.run import repair
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import CHAT, Passage
from tests.models import tiny_model, tiny_tokenizer

PASSAGES = [Passage(f"t{n}", f"fact {n} is {n * 37 % 11}") for n in range(6)]
QUESTIONS = [
    Question(f"what is {n}?", (PASSAGES[n % 6], *(p for p in PASSAGES if p != PASSAGES[n % 6])))
    for n in range(16)
]
PROMPT = CHAT.prompt("what is 2?", PASSAGES[:3], tiny_tokenizer())
QUICK = replace(
    LIMITS, passages=3, answer_tokens=5, held_out=6, held_out_share=0.5, closed_form=8, samples=8,
    fewest_samples=4, fewest_to_choose=2, store_bytes=1 << 26,
)  # fmt: skip
FAST = Speeds(4.0, 4.0, 4.0, 4.0)
"""Speeds at which only ``QUICK`` limits a plan, so that all plans are equal."""


def block_model(**config: Any) -> BlockModel:
    """Return a new tiny Llama. It is not shared, because repairs freeze its weights."""
    return BlockModel(tiny_model(num_hidden_layers=2, **config), tiny_tokenizer(), name="tiny")


def nearest(_: str, count: int) -> Sequence[Passage]:
    return PASSAGES[:count]


def material(model: BlockModel, **changes: Any) -> Material:
    tokenizer = model.tokenizer.tokenizer
    settings: dict[str, Any] = {
        "prompt": lambda question, passages: CHAT.prompt(question, passages, tokenizer),
        "prompt_format": "chat", "questions": QUESTIONS, **changes,
    }  # fmt: skip
    return Material(**settings)


_OPTIONS = ("limits", "minutes", "on_progress", "tolerance")


def repaired(model: BlockModel, output: Path, **changes: Any) -> Recipe:
    """Run a quick repair, with changed options or material. Returns its recipe."""
    torch.manual_seed(0)
    options = {"limits": QUICK, **{k: changes.pop(k) for k in _OPTIONS if k in changes}}
    return repair(model, material(model, **changes), output, **options)


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_and_die(output: Path, stage: str) -> None:
    """Run a repair that kills its own process. ``stage``: "comparing", or the number of a training
    step."""
    from blockattn_rag.lab.repair import stages
    from blockattn_rag.lab.trainer import LabTrainer

    stages.Repair.speeds = lambda *_: FAST  # type: ignore[method-assign]
    if stage == "comparing":
        compare, calls = Comparer.compare, iter((None, _die))

        def compare_or_die(self: Any, *args: Any) -> Any:
            return (next(calls) or compare)(self, *args)

        Comparer.compare = compare_or_die  # type: ignore[method-assign, assignment]
    else:
        step, proceed = int(stage), LabTrainer.training_step

        def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state.global_step == step:
                _die()
            return proceed(self, *args, **kwargs)

        LabTrainer.training_step = training_step  # type: ignore[method-assign]
    repaired(block_model(), output)
