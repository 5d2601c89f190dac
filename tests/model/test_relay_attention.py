"""Relay attention in transformers gives the same answers as the copy path, without copying."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from blockattn_rag.attention.latent import LatentMap
from blockattn_rag.attention.merge import Partial
from blockattn_rag.attention.segments import SegmentTable
from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.relay_attention import enable_relay
from blockattn_rag.model.sampling import Sampling
from tests.model.miniatures import (
    ASSEMBLIES,
    answers,
    logits_after,
    model_of_kinds,
    new_llama,
    new_model,
)
from tests.models import tiny_model, tiny_tokenizer

LENGTHS = (24, 1, 17, 30)
FINAL = 12


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


BLOCKS = [random_ids(count, seed) for seed, count in enumerate(LENGTHS)]
FINAL_IDS = random_ids(FINAL, 99)


@pytest.fixture(scope="module")
def llama() -> BlockModel:
    return new_llama()


def test_unsupported_models_take_the_copy_path() -> None:
    falcon = tiny_model("falcon", new_decoder_architecture=True, num_kv_heads=2, alibi=False)
    model = BlockModel(falcon, tiny_tokenizer())
    assert not model.supports_relay
    assert model.choose_assembly("auto", 5) == "copy"
    with pytest.raises(UnsupportedModelError, match="assembly='copy'"):
        model.choose_assembly("relay", 5)


def test_a_very_long_final_block_takes_the_copy_path(llama: BlockModel) -> None:
    assert llama.choose_assembly("auto", 50) == "relay"
    assert llama.choose_assembly("auto", 5000) == "copy"
    assert llama.choose_assembly("relay", 5000) == "relay"


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 3, "temperature": 1.5, "top_k": 20},
        {"extra": {"num_beams": 3}},
        {"extra": {"repetition_penalty": 1.7}},
        {"extra": {"num_beams": 2, "do_sample": False, "length_penalty": 0.3}},
    ],
    ids=["sampling", "beams", "penalty", "beams with penalty"],
)
def test_decoding_equals_the_copy_path(llama: BlockModel, options: dict[str, Any]) -> None:
    context = placed_context(llama, BLOCKS)
    sampling = Sampling(max_new_tokens=8, **options)
    assert llama.supports_relay
    found, expected = answers(llama, context, FINAL_IDS, sampling)
    assert found == expected


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_enabling_relay_changes_nothing_for_ordinary_calls(implementation: str) -> None:
    hf_model: PreTrainedModel = tiny_model("llama")
    hf_model.set_attn_implementation(implementation)
    options: dict[str, bool] = {"output_attentions": True} if implementation == "eager" else {}
    ids = torch.tensor([BLOCKS[0]])
    with torch.inference_mode():
        before = hf_model(ids, **options)
        enable_relay(hf_model)
        enable_relay(hf_model)  # idempotent
        after = hf_model(ids, **options)
    assert torch.equal(before.logits, after.logits)


def test_changing_the_attention_implementation_does_not_change_answers() -> None:
    model = new_llama()
    assert model.supports_relay
    context = placed_context(model, BLOCKS)
    before = logits_after(model, context, FINAL_IDS, "relay")
    model.hf_model.set_attn_implementation("eager")
    after = logits_after(model, context, FINAL_IDS, "relay")
    assert relative_error(after, before) <= 1e-5


def test_two_models_in_two_threads_do_not_share_plans() -> None:
    models = [new_llama(seed=seed) for seed in (1, 2)]
    assert all(model.supports_relay for model in models)

    def answer(model: BlockModel) -> list[list[int]]:
        return answers(model, placed_context(model, BLOCKS), FINAL_IDS, Sampling(max_new_tokens=20))

    expected = [answer(model) for model in models]
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(answer, models)] == expected


def test_relay_does_not_copy_the_context_to_the_cache(llama: BlockModel) -> None:
    context = placed_context(llama, BLOCKS)
    assert llama.supports_relay
    cache = llama.cache_for(context, assembly="relay")
    llama.next_logits(torch.tensor([FINAL_IDS]), cache)
    assert cache is not None
    assert {layer.keys.shape[-2] for layer in cache.layers} == {FINAL}  # type: ignore[union-attr]
    assert cache.get_seq_length() == sum(LENGTHS) + FINAL


def test_bfloat16_errors_of_relay_are_no_larger_than_those_of_copying() -> None:
    """Both are compared with the float32 oracle for the same rounded weights. Each layer rounds its
    hidden states about ten times to 8 bits. Over two layers, these errors add up like a random walk
    to sqrt(20) times half a unit in the last place, or 2e-2. Twice that is allowed."""
    rounded: Any = tiny_model("llama")
    rounded.to(torch.bfloat16)
    half = BlockModel(rounded, tiny_tokenizer())
    exact = tiny_model("llama")
    exact.load_state_dict(rounded.state_dict())
    errors: dict[str, list[float]] = {name: [] for name in ASSEMBLIES}
    for seed in range(6):
        blocks = [random_ids(20 + 7 * i, 10 * seed + i) for i in range(4)]
        final = random_ids(FINAL, 100 + seed)
        expected = oracle_logits(exact, [*blocks, final])[-1]
        context = placed_context(half, blocks)
        for assembly in ASSEMBLIES:
            found = logits_after(half, context, final, assembly).float()
            errors[assembly].append(relative_error(found, expected))
    means = {name: sum(values) / len(values) for name, values in errors.items()}
    assert means["relay"] <= 1.1 * means["copy"], means
    assert max(errors["relay"]) <= 4e-2


@pytest.mark.parametrize("kind", ["latent", "latent, interleaved", "latent and state"])
def test_latent_attention_takes_the_relay_path(kind: str) -> None:
    model = model_of_kinds(kind)
    assert model.choose_assembly("auto", 5) == "relay"
    assert model.choose_assembly("auto", 5000) == "copy"


def test_latents_are_read_without_expanding_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of_kinds("latent")
    assert model.supports_relay
    context, expanded = placed_context(model, BLOCKS), []

    def counted(module: Any, latents: Tensor, keys: Tensor) -> Any:
        expanded.append(latents.shape[2])
        return original(module, latents, keys)

    attention = type(model.hf_model.model.layers[0].self_attn)
    original = attention.expand_kv
    monkeypatch.setattr(attention, "expand_kv", counted)
    logits_after(model, context, FINAL_IDS, "relay")
    assert expanded == [FINAL] * 3


@pytest.mark.parametrize("fault", ["unrotated", "merged", "values"])
def test_the_probe_detects_wrong_attention(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = LatentMap.outputs

    def unrotated(self: SegmentTable, _: int, query: Tensor) -> Tensor:
        return query.expand(len(self.segments), *query.shape[1:])

    def merged(self: LatentMap, part: Partial) -> Partial:
        return right(self, Partial(part.output, torch.zeros_like(part.lse)))

    def values(self: LatentMap, part: Partial) -> Partial:
        return right(LatentMap(self.key, self.value.flip(0)), part)

    if fault == "unrotated":
        monkeypatch.setattr(SegmentTable, "rotated", unrotated)
        assert not new_llama().supports_relay
    else:
        monkeypatch.setattr(LatentMap, "outputs", merged if fault == "merged" else values)
    assert not new_model("latent").supports_relay


@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_refuses_drafted_tokens(llama: BlockModel, assembly: Literal["copy", "relay"]) -> None:
    context = placed_context(llama, BLOCKS)
    options = Sampling(max_new_tokens=8, extra={"prompt_lookup_num_tokens": 3})
    cache = llama.cache_for(context, assembly=assembly)
    with pytest.raises(ValueError, match=r"prompt_lookup_num_tokens.*not supported in block mode"):
        llama.generate(context.token_ids, FINAL_IDS, options, cache=cache)


def test_on_token_receives_all_tokens_of_a_multi_token_step(llama: BlockModel) -> None:
    handed: list[int] = []
    options = Sampling(max_new_tokens=8, extra={"prompt_lookup_num_tokens": 3})
    tokens = llama.generate(BLOCKS[0], FINAL_IDS, options, on_token=handed.append)
    assert tokens == handed == llama.generate(BLOCKS[0], FINAL_IDS, Sampling(max_new_tokens=8))
