from __future__ import annotations

from itertools import chain
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from blockattn_rag.check.oracle import oracle_logits
from recipes.hybrid_states import states
from recipes.hybrid_states.model import sink_of
from recipes.hybrid_states.prompts import Prompt
from recipes.hybrid_states.states import Treatment, collate, hidden_states


@pytest.fixture
def sink(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return sink_of(tokenizer)


@torch.inference_mode()
def final_logits(
    model: Qwen3_5ForCausalLM,
    prompts: list[Prompt],
    treatment: Treatment,
    sink: list[int],
    promote: int = 1,
) -> list[Tensor]:
    """Return the logits of each prompt's final block."""
    batch = collate(prompts, treatment, sink, promote, 4)
    logits = model.lm_head(hidden_states(model, batch))
    ends = [int(weights.nonzero()[-1]) + 1 for weights in batch.weights]
    return [
        row[end - len(prompt.weights) : end]
        for row, end, prompt in zip(logits, ends, prompts, strict=True)
    ]


@torch.inference_mode()
def test_full_mode_equals_the_forward_of_transformers(
    model: Qwen3_5ForCausalLM, prompts: list[Prompt], sink: list[int]
) -> None:
    for prompt, logits in zip(prompts, final_logits(model, prompts, "full", sink), strict=True):
        expected = model(input_ids=torch.tensor([[*chain(*prompt.blocks)]])).logits[0]
        assert_close(logits, expected[-len(prompt.weights) :], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("promote", [0, 1])
def test_start_from_the_head_equals_the_oracle_of_block_mode(
    model: Qwen3_5ForCausalLM, prompts: list[Prompt], sink: list[int], promote: int
) -> None:
    found = final_logits(model, prompts, "head", sink, promote)
    for prompt, logits in zip(prompts, found, strict=True):
        cut = len(prompt.blocks) - 1 - promote
        blocks = [*prompt.blocks[:cut], [*chain(*prompt.blocks[cut:])]]
        expected = oracle_logits(model, blocks, sink)
        assert_close(logits, expected[-len(prompt.weights) :], atol=1e-3, rtol=1e-4)


def test_treatments_start_from_different_states(
    model: Qwen3_5ForCausalLM, prompts: list[Prompt], sink: list[int]
) -> None:
    found = [final_logits(model, prompts[:1], t, sink)[0] for t in get_args(Treatment)]
    for number, logits in enumerate(found):
        for other in found[:number]:
            assert (logits - other).abs().max() > 1e-3


def test_composed_state_equals_affine_maps_that_passages_store(
    model: Qwen3_5ForCausalLM,
    prompts: list[Prompt],
    sink: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each passage's map A, B (state_after = A @ state_before + B) is computed separately."""
    rule = modeling_qwen3_5.torch_chunk_gated_delta_rule
    prompt = prompts[0]
    lengths = [len(block) for block in prompt.blocks]
    composed: list[Tensor] = []

    def parts(q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Any:
        """Compute the first run, [head, passages, final], from the maps of its passages."""
        outputs, _ = rule(q, k, v, **settings)

        def run(at: slice, values: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
            cut = {name: settings[name][:1, at] for name in ("g", "beta")}
            output, state = rule(
                q[:1, at], k[:1, at], values[:1, at], **{**settings, **cut},
                initial_state=start, output_final_state=True,
            )  # fmt: skip
            return output, state

        at = 0
        own, state = run(slice(0, lengths[0]), v, None)
        for length in lengths[:-1]:
            span = slice(at, at + length)
            if at:
                identity = torch.eye(k.shape[-1]).expand(1, k.shape[2], -1, -1)
                _, product = run(span, torch.zeros_like(v), identity)
                _, added = run(span, v, None)
                state = product @ state + added
            at += length
        own, _ = run(slice(at, None), v, state)
        composed.append(own)
        return torch.cat([torch.cat([outputs[:1, :at], own], dim=1), outputs[1:]]), None

    expected = final_logits(model, [prompt], "composed", sink, promote=0)[0]
    monkeypatch.setattr(states, "torch_chunk_gated_delta_rule", parts)
    found = final_logits(model, [prompt], "composed", sink, promote=0)[0]
    assert len(composed) == 2
    assert_close(found, expected, atol=1e-3, rtol=1e-4)
