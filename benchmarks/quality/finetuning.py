"""Block fine-tuning on the model's own full-mode answers, as in the papers. A baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.lab.evaluation.accuracy import make_prompt
from blockattn_rag.lab.evaluation.datasets import EvaluationSample
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.finetune import finetune
from blockattn_rag.prompts.formats import PromptFormat

MAX_ANSWER_TOKENS = 64
LORA_LEARNING_RATE = 2e-4
LEARNING_RATE = 2e-5
"""Peak learning rate of all weights, as in the papers."""


def write_answers(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    samples: Sequence[EvaluationSample],
    path: Path,
    count: int,
) -> None:
    """Write full mode's answers to the first samples as training data.

    Answers longer than ``MAX_ANSWER_TOKENS`` are left out. An incomplete file is continued.

    Raises:
        ValueError: The file has answers to other samples, or there are too few samples.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    places = {one.id: place for place, one in enumerate(samples)}
    last = json.loads(lines[-1])["id"] if lines else None
    if last is not None and last not in places:
        raise ValueError(f"{path} answers question {last}, which is not in the data: delete it")
    start = 0 if last is None else places[last] + 1
    kept = len(lines)
    with path.open("a", encoding="utf-8") as file:
        for one in samples[start:]:
            if kept >= count:
                break
            prompt = make_prompt(engine, form, one)
            found = engine.generate(
                prompt, mode="full", max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False
            )
            if found.finish_reason == "stop" and found.text.strip():
                record = {
                    "id": one.id,
                    "question": one.question,
                    "answer": found.text,
                    "passages": [asdict(passage) for passage in one.passages],
                }
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                file.flush()
                kept += 1
    if kept < count:
        raise ValueError(f"found {kept} answers of at most {MAX_ANSWER_TOKENS} tokens, not {count}")


def tune(model: str, data: Path, samples: int, output: Path, *, lora: bool) -> None:
    """Train one epoch: each sample in both modes, 4 prompts per step, 5 % of the steps warm-up."""
    finetune(
        FinetuneConfig(
            model,
            output,
            [data],
            lora=lora,
            learning_rate=LORA_LEARNING_RATE if lora else LEARNING_RATE,
            batch_size=4,
            warmup_steps=max(1, samples // 40),
            save_steps=4,
        )
    )
