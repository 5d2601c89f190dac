"""Block fine-tuning of a model for both modes on gold answers, as in the papers, and comparison of
the fine-tuned models."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rows import FULL, Record
from sets import Item

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.results import Mode
from blockattn_rag.lab.evaluation.datasets import EvaluationPassage, EvaluationSample
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.finetune import finetune
from blockattn_rag.prompts.formats import PromptFormat

LORA_RANK = 8
LORA_LEARNING_RATE = 3e-4
LEARNING_RATE = 2e-5
"""Peak learning rate for training all weights, as in the papers."""

STOCK_ROWS = FULL, "recipe"
"""Rows of the stock model: in full mode, and in block mode with its recipe."""

_CONTEXTS_PER_STEP = 4
_PASSAGES = (3, 6)
_MOST_TURNS = 4


def write_samples(questions: Sequence[EvaluationSample], path: Path, count: int) -> None:
    """Write contexts of 3 to 6 passages, each with up to 4 questions that these passages answer.

    The passages of a context are the first question's gold passage and a random selection of its
    distractors. Distractors are the gold passages of other questions, which become the other
    questions of the context and share its prefill. Each epoch selects different passages in a
    different order. The result is deterministic.

    Args:
        questions: Questions whose distractors are gold passages of other questions.
        count: Number of contexts to write.
    """
    draw = random.Random(0)
    by_gold = {_key(_gold(question)): question for question in questions}
    path.parent.mkdir(parents=True, exist_ok=True)
    order: list[EvaluationSample] = []
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            order = order or draw.sample(questions, len(questions))
            question = order.pop()
            others = [one for one in question.passages if not one.gold]
            passages = [_gold(question), *draw.sample(others, draw.randint(*_PASSAGES) - 1)]
            asked = [by_gold[_key(one)] for one in passages[1:] if _key(one) in by_gold]
            turns = [question, *asked][:_MOST_TURNS]
            draw.shuffle(passages)
            record = {
                "passages": [asdict(passage) for passage in passages],
                "turns": [{"question": one.question, "answer": one.answers[0]} for one in turns],
            }
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def _gold(question: EvaluationSample) -> EvaluationPassage:
    return next(passage for passage in question.passages if passage.gold)


def _key(passage: EvaluationPassage) -> tuple[str, str]:
    return passage.title, passage.text


def _has_fast_bfloat16() -> bool:
    """Return whether matrix products in bfloat16 are at least as fast as in float32. On CPUs with
    only AVX2, they are 5 times slower."""
    return torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def tune(model: str, data: Path, held_out: Path | None, output: Path, *, lora: bool) -> None:
    """Train for one epoch on the contexts, each in both modes, with 4 contexts per step.

    On a GPU, the contexts of a step are one batch. On a CPU, they are processed one by one without
    padding, and checkpoints are saved more often, because each step takes a minute.

    Args:
        held_out: Contexts for measuring the loss every 25 steps (100 on a GPU).
    """
    has_gpu, batch_size = torch.cuda.is_available(), 2 * _CONTEXTS_PER_STEP
    report = finetune(
        FinetuneConfig(
            model,
            output,
            [data],
            [held_out] if held_out else (),
            lora=lora,
            lora_rank=LORA_RANK,
            learning_rate=LORA_LEARNING_RATE if lora else LEARNING_RATE,
            batch_size=batch_size,
            per_device_batch_size=batch_size if has_gpu else 1,
            warmup_steps=5,
            bf16=_has_fast_bfloat16(),
            eval_steps=100 if has_gpu else 25,
            save_steps=100 if has_gpu else 5,
        )
    )
    print(f"{report.steps} steps in {report.seconds:.0f} s. {report.evaluation_text}")


@dataclass(frozen=True, eq=False)
class TunedAnswerer:
    """Answers a question with a model and its fine-tuned versions, in block and full mode.

    Args:
        stock: The stock model, with its recipe.
        tuned: Fine-tuned models by row name.
        form: Prompt format of the models.
        max_new_tokens: Maximum number of tokens per answer.
    """

    stock: BlockAttentionEngine
    tuned: Mapping[str, BlockAttentionEngine]
    form: PromptFormat
    max_new_tokens: int

    @property
    def rows(self) -> dict[str, tuple[BlockAttentionEngine, Mode]]:
        """Return the engine and mode of each row."""
        modes: tuple[Mode, Mode] = "full", "block"
        rows = {row: (self.stock, mode) for row, mode in zip(STOCK_ROWS, modes, strict=True)}
        for name, engine in self.tuned.items():
            rows |= {name: (engine, "block"), f"{name}, full mode": (engine, "full")}
        return rows

    def answer(self, item: Item, rows: Collection[str]) -> Iterator[Record]:
        """Answer a question in some rows. ``kl`` and ``agreement`` are NaN, because the stock
        model's logits are no reference for a model that was trained on other answers."""
        prompt = self.form.prompt(
            item.question, item.passages, self.stock.model.tokenizer.tokenizer
        )
        for row, (engine, mode) in self.rows.items():
            if row not in rows:
                continue
            if mode == "block":
                engine.precompute(prompt.context, as_prompt=True)
            found = engine.generate(
                prompt, mode=mode, max_new_tokens=self.max_new_tokens, do_sample=False
            )
            yield Record.of(item, row, found, is_timed=FULL in rows)
