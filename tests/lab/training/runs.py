"""Shared by the training tests: a tiny model on disk, records of all three kinds, and settings."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

from blockattn_rag.lab.trainer import LabTrainer
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.finetune import finetune
from blockattn_rag.lab.training.report import FinetuneReport
from tests.models import tiny_model, tiny_tokenizer


def write_model(folder: Path, family: str = "llama", **config: Any) -> Path:
    """Save a tiny random model of a family with ``save_pretrained``."""
    tiny_model(family, num_hidden_layers=2, **config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_data(file: Path, count: int = 4, seed: int = 0) -> Path:
    """Write ``count`` records of each kind. The questions ask which letter belongs to a name."""
    rng, lines = random.Random(seed), []
    for _ in range(count):
        (a, b), (x, y) = rng.sample("PQRS", 2), rng.sample("wxyz", 2)
        facts = [f"{a} is {x}.", f"{b} is {y}."]
        passages = [{"title": a, "text": facts[0]}, {"text": facts[1]}]
        turns = [{"role": "user", "content": facts[0]}, {"role": "assistant", "content": "Yes."}]
        asked = [{"role": "user", "content": f"{a}?"}, {"role": "assistant", "content": x}]
        lines += [
            {"blocks": facts, "prompt": f"{b} is ", "response": y},
            {"messages": turns + asked},
            {"question": f"{a}?", "passages": passages, "answer": x},
        ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return file


def settings(folder: Path, output: str = "out", **changes: Any) -> dict[str, Any]:
    """Return arguments of a quick ``FinetuneConfig`` for the model and the data in ``folder``."""
    return {
        "model": str(folder / "model"), "output": str(folder / output),
        "train_data": [str(folder / "train.jsonl")], "prompt_format": "turborag",
        "learning_rate": 1e-3, "batch_size": 4, "per_device_batch_size": 2, "warmup_steps": 2,
        "epochs": 2.0, "save_steps": 4, "progress": False, **changes,
    }  # fmt: skip


def config(arguments: dict[str, Any]) -> FinetuneConfig:
    return FinetuneConfig(**arguments)


def tune(folder: Path, output: str = "out", **changes: Any) -> FinetuneReport:
    """Run a quick training with the model and the data in ``folder``."""
    return finetune(config(settings(folder, output, **changes)))


def run_and_die(arguments: dict[str, Any], step: int) -> None:
    """Run a training that kills its own process before a step."""
    proceed = LabTrainer.training_step

    def training_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return proceed(self, *args, **kwargs)

    LabTrainer.training_step = training_step  # type: ignore[method-assign]
    finetune(config(arguments))
