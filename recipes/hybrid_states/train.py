"""Train the tiny hybrid model: ``python -m recipes.hybrid_states.train OUT``.

The first stage trains in full mode. Each further stage continues from its result with one way to
treat states, alternating between full and block mode. A stage saves checkpoints and continues
from them. Data depend on the step alone, so that an interruption changes nothing.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from blockattn_rag.model.loading import load_model, load_tokenizer
from recipes.hybrid_states.model import build_model, sink_of
from recipes.hybrid_states.prompts import Prompt, PromptWriter
from recipes.hybrid_states.states import Batch, Treatment, collate, hidden_states

STEPS = {"full": 320, "block": 60}
"""Optimizer steps of the first stage, and of each other stage."""

RATES = {"full": 1e-3, "block": 3e-4}
TOKENS_PER_STEP = 450
PROMOTE = 1
STAGES: tuple[Treatment, ...] = ("full", "head", "last", "composed")
SAVE_S = 60.0


def answer_logits(model: Qwen3_5ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits ``[t, vocab]`` and targets ``[t]`` at the ``t`` tokens of answers, and which tokens
    these are: ``[b, n - 1]``, bool."""
    is_answer = batch.weights[:, 1:] > 0
    logits = model.lm_head(hidden_states(model, batch)[:, :-1][is_answer])
    return logits, batch.ids[:, 1:][is_answer], is_answer


def step_prompts(tokenizer: PreTrainedTokenizerFast, stage: str, step: int) -> list[Prompt]:
    """The prompts of a step: as many as reach ``TOKENS_PER_STEP``."""
    writer = PromptWriter(tokenizer, random.Random(f"{stage}/{step}"))
    prompts: list[Prompt] = []
    while sum(len(block) for prompt in prompts for block in prompt.blocks) < TOKENS_PER_STEP:
        prompts.append(writer.training())
    return prompts


def train_stage(
    model: Qwen3_5ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    treatment: Treatment,
    steps: int,
    checkpoint: Path,
    until: float = math.inf,
    log: Callable[[str], None] = print,
) -> bool:
    """Train a model in place with one way to treat states.

    Args:
        treatment: ``full`` trains in full mode alone, the others in both modes by turns.
        checkpoint: File to continue from, if it exists, and to save to.
        until: Time at which to stop (``time.monotonic``).

    Returns:
        Whether all steps are done.
    """
    stage = "full" if treatment == "full" else "block"
    sink, kernel = sink_of(tokenizer), model.config.linear_conv_kernel_dim
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    start = _restore(checkpoint, model, optimizer)
    losses: list[float] = []
    saved = time.monotonic()
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = RATES[stage] * _schedule(step, steps)
        mode: Treatment = treatment if step % 2 else "full"
        prompts = step_prompts(tokenizer, stage, step)
        logits, targets, _ = answer_logits(model, collate(prompts, mode, sink, PROMOTE, kernel))
        loss = nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        is_due = time.monotonic() > min(until, saved + SAVE_S)
        if is_due or step == steps - 1:
            saved = time.monotonic()
            _save(checkpoint, model, optimizer, step + 1)
            log(f"{treatment} step {step + 1} loss {sum(losses[-20:]) / len(losses[-20:]):.4f}")
            if saved > until:
                return step == steps - 1
    return True


def _schedule(step: int, steps: int) -> float:
    """Share of the learning rate: a short warm-up, then a cosine to a thirtieth."""
    return min(1.0, (step + 1) / 20) * (0.03 + 0.97 * (1 + math.cos(math.pi * step / steps)) / 2)


def _restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, if it exists. Returns the number of steps done."""
    if not checkpoint.exists():
        return 0
    saved: dict[str, Any] = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _save(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    part = checkpoint.with_suffix(".part")
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(states, part)
    part.replace(checkpoint)


def _log(message: str) -> None:
    print(time.strftime("%H:%M:%S"), message, flush=True)


def main(
    out: Annotated[Path, typer.Argument(file_okay=False, help="Folder of the models.")],
    minutes: Annotated[
        float, typer.Option(help="Stop after these minutes; the same command continues.")
    ] = 45,
    full_steps: Annotated[int, typer.Option(help="Steps in full mode.")] = STEPS["full"],
    block_steps: Annotated[int, typer.Option(help="Steps for each treatment.")] = STEPS["block"],
) -> None:
    """Train in full mode, then in both modes with each way to treat states."""
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer("bundled")
    for treatment in STAGES:
        if (out / treatment).exists():
            continue
        base = out / "full"
        model = (
            build_model(load_model("bundled", device="cpu", dtype=torch.float32))
            if treatment == "full"
            else Qwen3_5ForCausalLM.from_pretrained(base, attn_implementation="eager")
        )
        steps = full_steps if treatment == "full" else block_steps
        if not train_stage(
            model, tokenizer, treatment, steps, out / f"{treatment}.pt", until, _log
        ):
            _log("Stopped: run the same command again to continue")
            return
        model.save_pretrained(out / treatment)
        tokenizer.save_pretrained(out / treatment)


if __name__ == "__main__":
    typer.run(main)
