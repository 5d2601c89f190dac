from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.bundled_model.base import (
    average_gradients,
    batches,
    build_model,
    collate,
    from_first,
    score,
    step_loss,
)
from recipes.bundled_model.rows import Row, RowWriter


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    return build_model(tokenizer, seed=0)


def test_the_weights_fit_the_package(model: LlamaForCausalLM) -> None:
    assert sum(p.numel() * p.element_size() for p in model.parameters()) < 12 * 2**20
    assert not model.config.tie_word_embeddings
    assert model.config.num_key_value_heads == 2


def test_batches_keep_to_their_budget_of_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    writer = RowWriter(tokenizer, random.Random(0))
    source = batches(lambda: writer.scene((1, 3)), tokens=1_500)
    for _ in range(20):
        ids, weights = collate(next(source))
        assert ids.shape == weights.shape
        assert ids.numel() <= 1_500 or len(ids) == 1


def test_padding_changes_no_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    writer = RowWriter(tokenizer, random.Random(0))
    short, long = writer.copy(), writer.numbers()
    counts = [sum(row.weights) for row in (short, long)]
    alone = [float(step_loss(model, [row]).detach()) for row in (short, long)]
    together = float(step_loss(model, [short, long]).detach())
    mean = sum(n * loss for n, loss in zip(counts, alone, strict=True)) / sum(counts)
    assert together == pytest.approx(mean, rel=1e-4)


def test_score_is_that_of_greedy_decoding(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    prompt = tokenizer("Halden Tower is", return_tensors="pt")
    out = model.generate(  # type: ignore[misc]
        **prompt, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    ids = out[0].tolist()
    given = prompt.input_ids.shape[1]
    right = Row(ids, [0.0] * given + [1.0] * (len(ids) - given))
    wrong = Row([*ids[:-1], (ids[-1] + 1) % 100], right.weights)
    result = score(model, [right, wrong])
    assert result.answers == 0.5
    assert result.tokens == pytest.approx(15 / 16)


def _train_together(rank: int, meeting: str) -> None:
    """Run one of two processes with different data; check that gradients and progress are equal."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    layer = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(layer.weight)
    data = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    layer(data[rank]).sum().backward()
    average_gradients(layer)
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 4.0]]
    assert from_first(rank + 0.25) == 0.25
    dist.destroy_process_group()


def test_two_processes_average_their_gradients_and_share_their_progress(tmp_path: Path) -> None:
    spawn(_train_together, (str(tmp_path / "meeting"),), nprocs=2)  # type: ignore[no-untyped-call]
