"""Cache of the copy path: room for new tokens, and one kernel for context and question on GPUs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from blockattn_rag.attention.kernels import attend_causal
from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.kv.context import Context, place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel, caches
from blockattn_rag.model.probe import LOGITS
from blockattn_rag.model.sampling import Sampling
from tests.attention.cuda_stand_ins import HALF, cuda_kernels_on_cpu
from tests.model.miniatures import answers, new_llama
from tests.models import tiny_model, tiny_tokenizer

CAUSAL = "blockattn_rag.model.relay_attention.attend_causal"
BLOCKS, FINAL = ([5, 6, 7, 8, 9], [10, 11, 12], [13]), [20, 21, 22, 23]


def context_of(model: BlockModel) -> Context:
    return placed_context(model, [*BLOCKS])


def logits(model: BlockModel, cache: Any, *steps: list[int]) -> torch.Tensor:
    """Run one forward pass per step. Returns the logits of the last one."""
    *_, last = (model.next_logits(torch.tensor([ids]), cache) for ids in steps)
    return last.float()


@pytest.mark.parametrize("room", [0, 3, 512])
@pytest.mark.parametrize("beams", [1, 3])
def test_answers_do_not_depend_on_the_room(
    monkeypatch: pytest.MonkeyPatch, room: int, beams: int
) -> None:
    model = new_llama()
    context = context_of(model)
    options = Sampling(max_new_tokens=9, extra={"num_beams": beams})
    monkeypatch.setattr(caches, "ROOM", room)
    by_relay, by_copy = answers(model, context, FINAL, options)
    assert by_copy == by_relay


def test_new_tokens_are_written_to_the_room_and_not_to_the_blocks() -> None:
    model = new_llama()
    context = context_of(model)
    before = [block.kv.keys[0].clone() for block in context.blocks]
    cache: Any = model.cache_for(place([context.blocks[0].kv]))
    start = cache.layers[0].keys.data_ptr()
    for token in FINAL:
        logits(model, cache, [token])
        assert cache.layers[0].keys.data_ptr() == start
    assert cache.get_seq_length() == len(BLOCKS[0]) + len(FINAL)
    for block, keys in zip(context.blocks, before, strict=True):
        assert torch.equal(block.kv.keys[0], keys)


def test_beam_search_does_not_keep_replaced_tensors() -> None:
    model = new_llama()
    cache: Any = model.cache_for(context_of(model))
    cache.batch_repeat_interleave(2)
    layer = cache.layers[0]
    state = layer.keys[:, :, :1].clone()
    with torch.inference_mode():
        layer.update(state, state)
    replaced = weakref.ref(layer.keys)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert replaced() is None


def test_gradients_flow_through_a_cache_with_room() -> None:
    model = new_llama()
    cache = model.cache_for(context_of(model))
    with torch.enable_grad():
        model.hf_model(
            input_ids=torch.tensor([FINAL]), past_key_values=cache
        ).logits.sum().backward()
    weights: Any = model.hf_model.get_input_embeddings().weight
    assert weights.grad.abs().sum() > 0


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model that uses CPU stand-ins for the GPU kernels."""
    target = "blockattn_rag.model.relay_attention.takes_flash"
    monkeypatch.setattr(target, lambda _, dtype, __: dtype in HALF)
    hf_model: Any = tiny_model("llama")
    with cuda_kernels_on_cpu():
        yield BlockModel(hf_model.to(torch.bfloat16), tiny_tokenizer())


def test_one_kernel_attends_to_context_and_question(
    monkeypatch: pytest.MonkeyPatch, on_gpu: BlockModel
) -> None:
    kernel = Mock(wraps=attend_causal)
    monkeypatch.setattr(CAUSAL, kernel)
    assert on_gpu.has_causal_kernel
    kernel.reset_mock()
    context = context_of(on_gpu)
    found = logits(on_gpu, on_gpu.cache_for(context), FINAL[:3], FINAL[3:])
    assert {call.args[0].shape[2] for call in kernel.call_args_list} == {3, 1}
    exact: Any = tiny_model("llama")
    exact.load_state_dict(on_gpu.hf_model.state_dict())
    expected = oracle_logits(exact, [*BLOCKS, FINAL])[-1]
    assert relative_error(found, expected) <= LOGITS[torch.bfloat16]


def test_a_gpu_copies_for_one_request_and_relays_for_several(on_gpu: BlockModel) -> None:
    assert on_gpu.choose_assembly("auto", 5) == "copy"
    assert on_gpu.choose_assembly("auto", 5, [Context(())] * 2) == "relay"
    cache: Any = on_gpu.cache_for(*[context_of(on_gpu)] * 2)
    assert cache.attention is None  # rows may have padding


def upper_left(query: Any, key: Any, value: Any, scale: float) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=query.shape[2] > 1, scale=scale, enable_gqa=True
    )


def missing(*_: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("kernel", [upper_left, missing])
def test_a_kernel_that_is_wrong_or_fails_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    on_gpu: BlockModel,
    kernel: Callable[..., torch.Tensor],
) -> None:
    monkeypatch.setattr(CAUSAL, kernel)
    assert not on_gpu.has_causal_kernel
    assert on_gpu.choose_assembly("auto", 5) == "relay"
    assert ("no kernel image is available" in caplog.text) == (kernel is missing)


def test_training_uses_the_models_own_attention(
    monkeypatch: pytest.MonkeyPatch, on_gpu: BlockModel
) -> None:
    cache = on_gpu.cache_for(context_of(on_gpu))
    monkeypatch.setattr(CAUSAL, None)  # raises if called
    with torch.enable_grad():
        on_gpu.hf_model(input_ids=torch.tensor([FINAL]), past_key_values=cache)
