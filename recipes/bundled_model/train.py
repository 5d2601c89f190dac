"""Train the bundled model from scratch: ``python -m recipes.bundled_model.train``.

There are four stages: a warm-up with copying and number comparisons, the task with full attention,
more questions of the types that are learned late, and block fine-tuning with
:func:`blockattn_rag.lab.training.finetune.finetune`, as for any model.
On several cores, processes are faster than threads for this model size: ``torchrun --nproc-per-node
2 -m recipes.bundled_model.train --threads 1``.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import distributed as dist
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from blockattn_rag.kv.context import Positions
from recipes.bundled_model.base import (
    TOKENS_PER_STEP,
    Probe,
    Score,
    Trainer,
    batches,
    build_model,
    is_first,
    processes,
)
from recipes.bundled_model.corpus import write_jsonl
from recipes.bundled_model.rows import Mix, Row, RowWriter
from recipes.bundled_model.tokenizer import build_tokenizer


@dataclass(frozen=True, slots=True)
class Plan:
    """Length of each stage in optimizer steps; samples and learning rate of block fine-tuning; and
    the number of probe questions per question type and number of passages."""

    warm_up_steps: int = 1_000
    task_steps: int = 5_600
    late_steps: int = 9_000
    block_samples: int = 3_000
    block_rate: float = 2e-4
    probe_samples: int = 24


# These contain more of what is learned late than the test questions do.
LATE = Mix(lookups=4, editions=0.8, pronouns=0.6)
TUNING = Mix(lookups=6, editions=0.7, pronouns=0.6)

BLOCK_BATCH = 4
"""Samples per step of block fine-tuning, over all processes."""

SMOKE = Plan(warm_up_steps=60, task_steps=40, late_steps=4, block_samples=16, probe_samples=6)


@dataclass(frozen=True, slots=True)
class TrainReport:
    """Results of the stages before block fine-tuning: losses by step, and scores before and after
    them."""

    warm_up: list[float]
    task: list[float]
    late: list[float]
    before: dict[str, Score]
    after: dict[str, Score]


def _print(message: str) -> None:
    if is_first():
        print(time.strftime("%H:%M:%S"), message, flush=True)


def warm_up(trainer: Trainer, writer: RowWriter, steps: int) -> list[float]:
    """Stage 1: copying, lookups and number comparisons. All rows of a batch have the same type."""
    rng = writer.rng
    sorts = [_batches(write) for write in (writer.copy, writer.facts, writer.numbers)]

    def source(_: float) -> list[Row]:
        return next(rng.choices(sorts, (0.2, 0.55, 0.25))[0])

    return trainer.run(source, steps, lambda progress: min(1.0, progress * 20 + 0.01))


def curriculum(progress: float) -> tuple[tuple[int, int], int | None]:
    """Return the range of passages per prompt, and the maximum number of characters around them.

    Short prompts come first, because the model learns the task from them in a fraction of the time.
    """
    if progress < 0.16:
        return (1, 3), 250
    return ((2, 5) if progress < 0.4 else (2, 10)), None


def learn_task(
    trainer: Trainer, writer: RowWriter, steps: int, minutes: float, probe: Probe
) -> list[float]:
    """Stage 2: complete prompts of increasing length, with fewer and fewer warm-up rows."""
    passages, longest_frame = curriculum(0.0)
    mixed = _fading(
        (writer.facts, writer.numbers), (0.65, 0.35), 0.2,
        lambda: writer.scene(passages, longest_frame), writer.rng,
    )  # fmt: skip

    def source(progress: float) -> list[Row]:
        nonlocal passages, longest_frame
        passages, longest_frame = curriculum(progress)
        return mixed(progress)

    return trainer.run(source, steps, lambda progress: _cosine(progress, 1.0), minutes, probe)


def learn_late(
    trainer: Trainer, writer: RowWriter, steps: int, minutes: float, probe: Probe
) -> list[float]:
    """Stage 3: mostly comparisons and order, which are learned long after lookups, because both
    must distinguish the first of two entities from the second; also pronouns, the hardest task."""
    source = _fading(
        (writer.articles, lambda: writer.facts(again=1.0), writer.numbers), (0.8, 0.1, 0.1), 0.6,
        lambda: writer.scene((2, 10), mix=LATE), writer.rng,
    )  # fmt: skip
    return trainer.run(source, steps, lambda progress: _cosine(progress, 0.6), minutes, probe)


def _fading(
    drills: Sequence[Callable[[], Row]],
    weights: Sequence[float],
    share: float,
    scene: Callable[[], Row],
    rng: random.Random,
) -> Callable[[float], list[Row]]:
    """Mix complete prompts with drills, whose share decreases from ``share`` to 0."""
    drilling, scenes = [_batches(write) for write in drills], _batches(scene)

    def source(progress: float) -> list[Row]:
        if rng.random() < share * (1 - progress):
            return next(rng.choices(drilling, weights)[0])
        return next(scenes)

    return source


def _batches(write: Callable[[], Row]) -> Iterator[list[Row]]:
    """Yield this process's share of the rows of each step."""
    return batches(write, TOKENS_PER_STEP // processes())


def _cosine(progress: float, peak: float) -> float:
    """Return a share of the learning rate that decreases from about ``peak`` to 3 % of it."""
    return peak * (0.03 + 0.97 * (1 + math.cos(math.pi * progress)) / 2)


def train_base(
    out: Path,
    plan: Plan,
    seed: int = 0,
    minutes: float = math.inf,
    log: Callable[[str], None] = _print,
) -> TrainReport:
    """Stages 1 to 3: train a tokenizer and a full-attention model, and save them to ``out``."""
    tokenizer = build_tokenizer(seed)
    model = build_model(tokenizer, seed)
    rank = dist.get_rank() if dist.is_initialized() else 0
    log(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    probe = Probe(tokenizer, n=plan.probe_samples)
    trainer = Trainer(model, out, log)
    writer = RowWriter(tokenizer, random.Random(f"{seed}/rows/{rank}"))
    before = probe(model)
    warm_losses = warm_up(trainer, writer, plan.warm_up_steps)
    save(model, tokenizer, out)
    log(f"warm-up done, loss {sum(warm_losses[-50:]) / len(warm_losses[-50:]):.4f}")
    task_losses = learn_task(trainer, writer, plan.task_steps, minutes, probe)
    save(model, tokenizer, out)
    late = Trainer(model, out, log), RowWriter(tokenizer, random.Random(f"{seed}/late/{rank}"))
    late_losses = learn_late(*late, plan.late_steps, minutes, probe)
    save(model, tokenizer, out)
    report = TrainReport(warm_losses, task_losses, late_losses, before, probe(model))
    log("  ".join(f"{name} {score.answers:.2f}" for name, score in report.after.items()))
    return report


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save the weights and the tokenizer, with greedy decoding as the default."""
    if not is_first():
        return
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def base_of(out: Path) -> Path:
    """Return the folder of the base model of ``out``."""
    return out.with_name(out.name + "-base")


def data_of(out: Path) -> Path:
    """Return the path of the data file for block fine-tuning."""
    return out.with_name(out.name + "-data.jsonl")


def check_paths(out: Path, base: Path | None) -> None:
    """Check before training that nothing would be overwritten.

    Raises:
        FileExistsError: A file or folder that the training writes exists.
    """
    from blockattn_rag.lab.work import work_of

    written = [out, data_of(out), work_of(out), *([] if base else [base_of(out)])]
    if existing := [str(path) for path in written if os.path.lexists(path)]:
        raise FileExistsError(
            f"{', '.join(existing)} would be overwritten: delete it, or choose another --out"
        )


def write_block_data(path: Path, tokenizer: PreTrainedTokenizerFast, seed: int, n: int) -> None:
    """Write ``n`` prompts about training entities, in all formats, as block training records."""
    writer = RowWriter(tokenizer, random.Random(f"{seed}/block"))
    write_jsonl(path, (writer.record((2, 10), mix=TUNING) for _ in range(n)))


def block_finetune(
    base: Path, out: Path, plan: Plan, seed: int = 0, positions: Positions = "reordered"
) -> None:
    """Stage 4: the package's block fine-tuning, with each sample in block and full mode.

    Only answer tokens have a loss. Earlier stages did not train the model to predict heads and
    questions; their loss would dominate at first and degrade lookups.

    ``positions="composite"`` is the ablation of the papers, without position re-encoding.
    """
    from blockattn_rag.lab.training.config import FinetuneConfig
    from blockattn_rag.lab.training.finetune import finetune
    from blockattn_rag.model.loading import load_tokenizer

    data = data_of(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    if is_first():
        write_block_data(data, load_tokenizer(base), seed, plan.block_samples)
    if processes() > 1:
        dist.barrier()  # the other processes read the file that the first process wrote
    finetune(
        FinetuneConfig(
            model=str(base),
            output=out,
            train_data=[data],
            learning_rate=plan.block_rate,
            lr_scheduler="cosine",
            batch_size=BLOCK_BATCH,
            per_device_batch_size=BLOCK_BATCH // processes(),
            adam_beta2=0.98,
            seed=seed,
            positions=positions,
            progress=False,
        )
    )


def main(
    out: Annotated[
        Path, typer.Option(help="Folder for the finished model; also writes OUT-data.jsonl.")
    ] = Path("bundled"),
    seed: Annotated[int, typer.Option(help="Seed for data and weights.")] = 0,
    minutes: Annotated[
        float, typer.Option(min=0.01, help="Time limit for each of stages 2 and 3.")
    ] = math.inf,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
    base: Annotated[
        Path | None, typer.Option(help="Model to fine-tune. Default: train OUT-base first.")
    ] = None,
    positions: Annotated[
        Positions,
        typer.Option(help="Positions in block fine-tuning: reordered or composite."),
    ] = "reordered",
    smoke: Annotated[bool, typer.Option("--smoke", help="Run a short smoke test.")] = False,
) -> None:
    """Train the bundled model: OUT-base after full attention only, OUT after block fine-tuning."""
    torch.set_num_threads(threads)
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    if BLOCK_BATCH % processes():
        raise typer.BadParameter(f"Found {processes()} processes, expected 1, 2 or {BLOCK_BATCH}")
    try:
        check_paths(out, base)
    except FileExistsError as error:
        raise typer.BadParameter(str(error)) from error
    if processes() > 1:
        dist.barrier()  # every process has checked the paths before the first one writes
    plan = SMOKE if smoke else Plan()
    if base is None:
        base = base_of(out)
        train_base(base, plan, seed, minutes)
    block_finetune(base, out, plan, seed, positions)


if __name__ == "__main__":
    typer.run(main)
