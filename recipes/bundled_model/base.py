"""The base model: its architecture, and training on rows with full causal attention."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.bundled_model.corpus import generate_samples
from recipes.bundled_model.induction_heads import set_induction_heads
from recipes.bundled_model.rows import Row, RowWriter
from recipes.bundled_model.scenes import QUESTION_KINDS

LEARNING_RATE = 1.2e-3
TOKENS_PER_STEP = 1_800


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Create a Llama with less than two million parameters and grouped-query attention.

    The RoPE base is low, so that most wavelengths are between the lengths of a passage and of a
    prompt. The model needs these to determine which of two passages comes later.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4_096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    set_induction_heads(model)
    return model


def batches(write: Callable[[], Row], tokens: int, pool: int = 48) -> Iterator[list[Row]]:
    """Yield batches of similarly long rows endlessly: one row, or up to ``tokens`` with padding."""
    while True:
        rows = sorted((write() for _ in range(pool)), key=lambda row: len(row.ids))
        found: list[list[Row]] = [[]]
        for row in rows:
            if found[-1] and len(row.ids) * (len(found[-1]) + 1) > tokens:
                found.append([])
            found[-1].append(row)
        random.Random(len(rows[0].ids)).shuffle(found)
        yield from found


def collate(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Collate rows to ids and weights, both ``[rows, longest]``. Padding is on the right, where
    causal attention ignores it, so no mask is needed."""
    ids = nn.utils.rnn.pad_sequence([torch.tensor(r.ids) for r in rows], batch_first=True)
    weights = nn.utils.rnn.pad_sequence([torch.tensor(r.weights) for r in rows], batch_first=True)
    return ids, weights


def predictions(model: LlamaForCausalLM, ids: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Compute logits ``[n, vocabulary]`` and targets ``[n]`` for the ``n`` wanted tokens only."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, :-1][wanted[:, 1:]]), ids[:, 1:][wanted[:, 1:]]


def step_loss(model: LlamaForCausalLM, rows: Sequence[Row]) -> Tensor:
    """Compute the weighted mean cross-entropy of a batch."""
    ids, weights = collate(rows)
    logits, targets = predictions(model, ids, weights > 0)
    each = nn.functional.cross_entropy(logits, targets, reduction="none")
    weight = weights[:, 1:][weights[:, 1:] > 0]
    return (each * weight).sum() / weight.sum()


@dataclass(frozen=True, slots=True)
class Score:
    """Teacher-forced accuracy: shares of answers, and of answer tokens, that the model predicts
    correctly. If all tokens of an answer are the model's first choice, greedy decoding generates
    exactly this answer, so one forward pass per batch is sufficient, without decoding."""

    answers: float
    tokens: float


@torch.no_grad()
def score(model: LlamaForCausalLM, rows: Sequence[Row], batch_rows: int = 10) -> Score:
    """Score a model on rows in which only answer tokens have a positive weight."""
    right_rows = right_tokens = all_tokens = 0
    for start in range(0, len(rows), batch_rows):
        ids, weights = collate(rows[start : start + batch_rows])
        wanted = weights > 0
        logits, targets = predictions(model, ids, wanted)
        hit = torch.ones_like(wanted[:, 1:])
        hit[wanted[:, 1:]] = logits.argmax(-1) == targets
        right_rows += int(hit.all(dim=1).sum())
        right_tokens += int(hit[wanted[:, 1:]].sum())
        all_tokens += len(targets)
    return Score(right_rows / len(rows), right_tokens / all_tokens)


class Probe:
    """Held-out questions about test entities, to monitor accuracy during training."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, sizes: Sequence[int] = (2, 5), n: int = 24
    ) -> None:
        writer = RowWriter(tokenizer, random.Random(0))
        self._rows = {
            (kind, size): [writer.sample(s) for s in generate_samples(99, "test", kind, size, n)]
            for kind in QUESTION_KINDS
            for size in sizes
        }

    def __call__(self, model: LlamaForCausalLM) -> dict[str, Score]:
        """Return the model's scores by ``kind@passages``."""
        return {f"{kind}@{size}": score(model, rows) for (kind, size), rows in self._rows.items()}


def processes() -> int:
    """Return the number of processes that train together: 1, or more with ``torchrun``."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    """Return whether this process is the one that logs and saves."""
    return processes() == 1 or dist.get_rank() == 0


def from_first(number: float) -> float:
    """Broadcast the first process's number, so that all processes end a stage at the same step."""
    if processes() == 1:
        return number
    shared = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(shared, 0)
    return shared.item()


def average_gradients(model: nn.Module) -> None:
    """Replace the gradients with their mean over all processes."""
    if processes() == 1:
        return
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads]) / processes()
    dist.all_reduce(flat)
    for grad, mean in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


class Trainer:
    """AdamW training whose learning rate is a function of progress in [0, 1]."""

    def __init__(self, model: LlamaForCausalLM, out: Path, log: Callable[[str], None]) -> None:
        self.model = model
        self.out = out
        self.log = log
        if processes() > 1:
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.02, fused=True
        )

    def run(
        self,
        source: Callable[[float], list[Row]],
        steps: int,
        rate: Callable[[float], float],
        minutes: float = math.inf,
        probe: Probe | None = None,
        log_s: float = 120.0,
        probe_s: float = 420.0,
    ) -> list[float]:
        """Train for ``steps`` steps, or for ``minutes`` if this is shorter, and return the losses.

        ``source`` and ``rate`` map progress to the rows of a step and to the learning rate's share.
        """
        losses: list[float] = []
        start = logged = probed = time.perf_counter()
        tokens = 0
        for step in range(steps):
            now = time.perf_counter()
            progress = from_first(max(step / steps, (now - start) / 60 / minutes))
            if progress >= 1:
                break
            for group in self.optimizer.param_groups:
                group["lr"] = LEARNING_RATE * rate(progress)
            rows = source(progress)
            tokens += sum(len(row.ids) for row in rows)
            loss = step_loss(self.model, rows)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            average_gradients(self.model)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
            if now - logged > log_s:
                logged = now
                recent = losses[-50:]
                self.log(
                    f"step {step} ({progress:.0%}) loss {sum(recent) / len(recent):.4f} "
                    f"{tokens / (now - start):.0f} tokens/s {(now - start) / 60:.1f} min"
                )
            if probe and is_first() and now - probed > probe_s:
                self.log("  ".join(f"{k} {v.answers:.2f}" for k, v in probe(self.model).items()))
                self.model.save_pretrained(self.out)
                probed = time.perf_counter()
        return losses
