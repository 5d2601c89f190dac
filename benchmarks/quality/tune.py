"""Block fine-tuning on the answers of a model's own full mode: the papers' way, as a baseline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.lab.evaluation.datasets import EvaluationSample
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.finetune import finetune
from blockattn_rag.prompts.formats import Passage, PromptFormat

MAX_ANSWER_TOKENS = 64
LEARNING_RATES = {True: 2e-4, False: 2e-5}
"""Peak learning rate with LoRA (usual) and without (the papers')."""


def write_answers(
    engine: BlockAttentionEngine,
    form: PromptFormat,
    samples: Sequence[EvaluationSample],
    path: Path,
    count: int,
) -> None:
    """Write full mode's complete answers as training data, until the file has ``count`` of them.

    Answers longer than ``MAX_ANSWER_TOKENS`` are left out. A file that exists is continued.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = len(lines)
    last = json.loads(lines[-1])["id"] if lines else None
    start = next((i + 1 for i, one in enumerate(samples) if one.id == last), 0)
    with path.open("a", encoding="utf-8") as file:
        for one in samples[start:]:
            if kept >= count:
                break
            passages = [Passage(each.title, each.text) for each in one.passages]
            prompt = form.prompt(one.question, passages, engine.model.tokenizer.tokenizer)
            found = engine.generate(
                prompt, mode="full", max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False
            )
            if found.finish_reason == "stop" and found.text.strip():
                fields = {"id": one.id, "question": one.question, "answer": found.text}
                shown = [{"title": each.title, "text": each.text} for each in passages]
                file.write(json.dumps({**fields, "passages": shown}, ensure_ascii=False) + "\n")
                file.flush()
                kept += 1


def tune(model: str, data: Path, output: Path, *, lora: bool) -> None:
    """Train one epoch, with batches of 4 samples in both modes and a tenth of it as warm-up."""
    samples = len(data.read_text(encoding="utf-8").splitlines())
    finetune(
        FinetuneConfig(
            model,
            output,
            [data],
            lora=lora,
            learning_rate=LEARNING_RATES[lora],
            batch_size=4,
            warmup_steps=max(1, samples // 40),
            save_steps=4,
            resume=Path(f"{output}.work").exists(),
        )
    )
