"""A plan only applies to the forward pass with its cache. Other forward passes use ordinary
attention, during ``generate`` and after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor

from blockattn_rag.check.model import placed_context
from blockattn_rag.model import BlockModel
from blockattn_rag.model.sampling import Sampling
from tests.model import miniatures
from tests.model.miniatures import new_llama
from tests.model.test_relay_attention import BLOCKS, FINAL_IDS
from tests.models import tiny_model, tiny_tokenizer

NEW = 8


@pytest.fixture
def llama() -> BlockModel:
    return new_llama()


def answers(model: BlockModel, blocks: list[list[int]], **extra: Any) -> list[list[int]]:
    """Return the new tokens with relay attention, and with the copy path."""
    assert model.supports_relay
    sampling = Sampling(max_new_tokens=NEW, extra=extra)
    return miniatures.answers(model, placed_context(model, blocks), FINAL_IDS, sampling)


def in_full(model: BlockModel, blocks: list[list[int]], **extra: Any) -> list[int]:
    ids = [token for block in blocks for token in block]
    return model.generate(ids, FINAL_IDS, Sampling(max_new_tokens=NEW, extra=extra))


GUIDANCE: list[dict[str, Any]] = [
    {"guidance_scale": 1.5},
    {"guidance_scale": 4.0},
    {"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([BLOCKS[3]])},
]


@pytest.mark.parametrize("options", GUIDANCE, ids=["weak", "strong", "negative prompt"])
def test_guidance_equals_copying_and_full_mode(llama: BlockModel, options: dict[str, Any]) -> None:
    by_relay, by_copy = answers(llama, BLOCKS, **options)
    assert by_relay == by_copy
    by_relay, _ = answers(llama, BLOCKS[:1], **options)
    assert by_relay == in_full(llama, BLOCKS[:1], **options)
    assert by_relay != in_full(llama, BLOCKS[:1])  # guidance has an effect


class RunsTheModel(LogitsProcessor):
    """Subtracts the scores for the last tokens without context, computed by ``run``."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        self._run = run

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores - 0.7 * self._run(input_ids[:, -5:])


def ways_of_running(model: BlockModel) -> dict[str, Callable[[Tensor], Tensor]]:
    hf_model: Any = model.hf_model
    decoder, head = hf_model.model, hf_model.lm_head
    return {
        "no cache": lambda ids: hf_model(ids, use_cache=False).logits[:, -1],
        "its own cache": lambda ids: hf_model(ids, past_key_values=DynamicCache()).logits[:, -1],
        "the decoder alone": lambda ids: head(decoder(ids).last_hidden_state)[:, -1],
        "generate": lambda ids: hf_model.generate(
            ids, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        ).logits[0],
    }


@pytest.mark.parametrize("way", ["no cache", "its own cache", "the decoder alone", "generate"])
def test_nested_processor_equals_the_copy_path(llama: BlockModel, way: str) -> None:
    processor = RunsTheModel(ways_of_running(llama)[way])
    by_relay, by_copy = answers(llama, BLOCKS, logits_processor=[processor])
    assert by_relay == by_copy
    assert by_relay != answers(llama, BLOCKS)[0]


def test_a_nested_forward_keeps_the_plan_of_the_outer_one(llama: BlockModel) -> None:
    """A hook on a layer runs the complete model once in the middle of each forward pass."""
    hf_model: Any = llama.hf_model
    expected = answers(llama, BLOCKS)[1]
    inside = False

    def run_again(*_: Any) -> None:
        nonlocal inside
        if not inside:
            inside = True
            hf_model(torch.tensor([[5, 6, 7]]), use_cache=False)
            inside = False

    handle = hf_model.model.layers[1].register_forward_hook(run_again)
    assert answers(llama, BLOCKS)[0] == expected
    handle.remove()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_forward_leaves_no_plan(llama: BlockModel, error: type[BaseException]) -> None:
    hf_model: Any = llama.hf_model
    context = placed_context(llama, BLOCKS)
    layer_before = hidden_of_first_layer(hf_model)
    fail = Mock(side_effect=error("in the middle"))
    handle = hf_model.model.layers[1].register_forward_hook(fail)
    for run in (
        lambda cache: llama.next_logits(torch.tensor([FINAL_IDS]), cache),
        lambda cache: llama.generate(context.token_ids, FINAL_IDS, Sampling(2), cache=cache),
    ):
        with pytest.raises(error, match="in the middle"):
            run(llama.cache_for(context, assembly="relay"))
    handle.remove()
    assert torch.equal(hidden_of_first_layer(hf_model), layer_before)


@torch.inference_mode()
def hidden_of_first_layer(hf_model: Any) -> Tensor:
    """Run the first layer on its own, outside of any forward pass of the model."""
    states = hf_model.model.embed_tokens(torch.tensor([[3, 4, 5]]))
    positions = hf_model.model.rotary_emb(states, torch.arange(3)[None])
    output = hf_model.model.layers[0](states, position_embeddings=positions)
    return output if isinstance(output, Tensor) else output[0]


def test_a_model_wrapped_by_peft_generates_with_relay() -> None:
    config = LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    wrapped: Any = get_peft_model(tiny_model("llama"), config)
    by_relay, by_copy = answers(BlockModel(wrapped, tiny_tokenizer()), BLOCKS)
    assert by_relay == by_copy


def test_a_model_created_from_the_config_of_another_supports_relay(llama: BlockModel) -> None:
    """The config already names relay attention, but the new model must still be set up for it."""
    assert llama.supports_relay
    other = copy.deepcopy(llama.hf_model)
    made = type(llama.hf_model)(llama.hf_model.config)
    made.load_state_dict(other.state_dict())
    expected = answers(llama, BLOCKS)[0]
    for hf_model in (other, made):
        assert answers(BlockModel(hf_model, tiny_tokenizer()), BLOCKS) == [expected, expected]
