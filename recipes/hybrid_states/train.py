"""Train the tiny hybrid model: ``python -m recipes.hybrid_states.train OUT``.

The first stage trains each state layer to imitate the attention layer of the bundled model that it
replaces. The second stage trains the model in full mode. Each further stage continues from this
model with one treatment of states, alternating between full and block mode. All stages save
checkpoints and resume from them. The data depend only on the step, so that interruptions do not
affect the result.
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
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from blockattn_rag.model.loading import load_model, load_tokenizer
from recipes.hybrid_states.model import attention_of, build_model, sink_of
from recipes.hybrid_states.prompts import Prompt, PromptWriter
from recipes.hybrid_states.states import Batch, Treatment, collate, hidden_states, mix

IMITATION, FULL, BLOCK = 120, 450, 70
"""Optimizer steps per stage; ``BLOCK`` for each treatment of states."""

IMITATION_RATE, FULL_RATE, BLOCK_RATE = 3e-3, 1e-3, 7e-4
TOKENS_PER_STEP = 450
PROMOTE = 1
STAGES: tuple[Treatment, ...] = ("full", "head", "last", "composed")
SAVE_S = 60.0

Loss = Callable[[int], Tensor]
"""Function that maps a step's number to its loss."""


def answer_logits(model: Qwen3_5ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits ``[t, vocab]`` and targets ``[t]`` for the ``t`` answer tokens, and the mask of
    these tokens, ``[b, n - 1]``, bool."""
    is_answer = batch.weights[:, 1:] > 0
    logits = model.lm_head(hidden_states(model, batch)[:, :-1][is_answer])
    return logits, batch.ids[:, 1:][is_answer], is_answer


def step_prompts(tokenizer: PreTrainedTokenizerFast, stage: str, step: int) -> list[Prompt]:
    """Generate the prompts of a step, until they contain ``TOKENS_PER_STEP`` tokens."""
    writer = PromptWriter(tokenizer, random.Random(f"{stage}/{step}"))
    prompts: list[Prompt] = []
    while sum(len(block) for prompt in prompts for block in prompt.blocks) < TOKENS_PER_STEP:
        prompts.append(writer.training())
    return prompts


def task_loss(
    model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, treatment: Treatment
) -> Loss:
    """Return the cross-entropy loss: full mode for even steps, the treatment for odd ones."""
    sink, kernel = sink_of(tokenizer), model.config.linear_conv_kernel_dim
    stage = "full" if treatment == "full" else "block"

    def loss(step: int) -> Tensor:
        mode: Treatment = treatment if step % 2 else "full"
        prompts = step_prompts(tokenizer, stage, step)
        logits, targets, _ = answer_logits(model, collate(prompts, mode, sink, PROMOTE, kernel))
        return nn.functional.cross_entropy(logits, targets)

    return loss


def imitation_loss(
    model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, base: PreTrainedModel
) -> Loss:
    """Return the loss of the state layers: the squared error of their outputs, relative to the
    outputs of the corresponding attention layers of ``base`` for the same inputs."""
    kernel, traced = model.config.linear_conv_kernel_dim, attention_of(base)

    def loss(step: int) -> Tensor:
        batch = collate(step_prompts(tokenizer, "imitation", step), "full", (), 0, kernel)
        is_token = torch.zeros(batch.ids.shape, dtype=torch.bool)
        is_token.view(-1)[batch.runs[batch.runs < is_token.numel()]] = True
        errors = []
        for (inputs, outputs), layer in zip(traced(batch.ids), model.model.layers, strict=True):
            if hasattr(layer, "linear_attn"):
                error = mix(layer.linear_attn, batch, inputs) - outputs
                errors.append(error[is_token].square().mean() / outputs[is_token].square().mean())
        return torch.stack(errors).sum()

    return loss


def train_stage(
    model: Qwen3_5ForCausalLM,
    loss_of: Loss,
    steps: int,
    rate: float,
    checkpoint: Path,
    until: float = math.inf,
    log: Callable[[str], None] = print,
) -> bool:
    """Train a model in place.

    Args:
        rate: Maximum learning rate.
        checkpoint: File to resume from, if it exists, and to save to.
        until: Time at which to stop (``time.monotonic``).

    Returns:
        Whether all steps are complete.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), betas=(0.9, 0.98), weight_decay=0.02, fused=True
    )
    losses: list[float] = []
    saved = time.monotonic()
    for step in range(_restore(checkpoint, model, optimizer), steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * _schedule(step, steps)
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if time.monotonic() > min(until, saved + SAVE_S) or step == steps - 1:
            saved = time.monotonic()
            _save(checkpoint, model, optimizer, step + 1)
            recent = losses[-20:]
            log(f"{checkpoint.stem} step {step + 1} loss {sum(recent) / len(recent):.4f}")
            if saved > until:
                return step == steps - 1
    return True


def _schedule(step: int, steps: int) -> float:
    """Return the share of the learning rate: a short warm-up, then cosine decay to 3 %."""
    return min(1.0, (step + 1) / 20) * (0.03 + 0.97 * (1 + math.cos(math.pi * step / steps)) / 2)


def load_weights(model: nn.Module, out: Path, stage: str) -> None:
    """Load the weights that a stage saved in the folder ``out``."""
    model.load_state_dict(torch.load(out / f"{stage}.pt", weights_only=True)["model"])


def _restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load a checkpoint, if it exists, and return the number of completed steps."""
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
    out: Annotated[Path, typer.Argument(file_okay=False, help="Folder for the models.")],
    minutes: Annotated[
        float, typer.Option(help="Stop after this time; run the command again to continue.")
    ] = 45,
    smoke: Annotated[bool, typer.Option("--smoke", help="Run only two steps per stage.")] = False,
) -> None:
    """Train a model in full mode, then in both modes with each treatment of states."""
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * minutes
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = load_tokenizer("bundled")
    imitation, full, block = (2, 2, 2) if smoke else (IMITATION, FULL, BLOCK)
    base = load_model("bundled", device="cpu", dtype=torch.float32)
    model = build_model(base)
    stages = [(imitation_loss(model, tokenizer, base), imitation, IMITATION_RATE, "imitation")]
    for treatment in STAGES:
        steps, rate = (full, FULL_RATE) if treatment == "full" else (block, BLOCK_RATE)
        stages.append((task_loss(model, tokenizer, treatment), steps, rate, treatment))
    for loss, steps, rate, name in stages:
        if name in STAGES[1:]:
            load_weights(model, out, "full")
        if not train_stage(model, loss, steps, rate, out / f"{name}.pt", until, _log):
            break
    else:
        return
    _log("Stopped: run the same command again to continue")


if __name__ == "__main__":
    typer.run(main)
