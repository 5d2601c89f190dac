"""Sliding windows, soft caps, attention sinks, shared layers and scaled queries on the relay path
and in recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

from blockattn_rag.check.model import placed_context
from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.kv.context import Context
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model import BlockModel
from blockattn_rag.model.kinds import LayerKind, seen_attention
from blockattn_rag.model.miniature import miniature
from blockattn_rag.model.probe import LOGITS, probe_cache
from blockattn_rag.model.recompute import attention_to_context, recompute
from blockattn_rag.model.relay_attention import enable_relay
from blockattn_rag.model.sampling import Sampling
from tests.model.dense import dense_attention, dense_logits, measured
from tests.model.families import KINDS
from tests.model.miniatures import ASSEMBLIES, logits_after, new_llama, new_model
from tests.model.test_relay_attention import BLOCKS, FINAL_IDS, random_ids
from tests.models import tiny_tokenizer

EXACT = LOGITS[torch.float32]
NUM = sum(map(len, BLOCKS))
IS_PASSAGE = [False, True, True, True]
WINDOWED = [kind for kind in KINDS if kind.startswith(("windows", "shared"))]
WINDOWED.remove("windows and state")


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("limits", [{}, {"_MOST_ROWS": 3}, {"MOST_SCORES": 60}], ids=str)
def test_recomputed_tokens_equal_a_dense_forward(
    kind: str, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(kind)
    for name, limit in limits.items():
        monkeypatch.setattr(f"blockattn_rag.model.chosen_attention.{name}", limit)
    context = placed_context(model, BLOCKS)
    received = attention_to_context(model, context, FINAL_IDS)
    expected = dense_attention(new_model(kind), [*BLOCKS, FINAL_IDS])
    torch.testing.assert_close(received, expected, rtol=1e-4, atol=1e-5)
    changed, chosen = recompute(model, context, IS_PASSAGE, FINAL_IDS, 0.4)
    assert len(chosen) == round(0.4 * (NUM - len(BLOCKS[0])))
    logits = dense_logits(new_model(kind), [*BLOCKS, FINAL_IDS], chosen)
    for assembly in ASSEMBLIES:
        found = logits_after(model, changed, FINAL_IDS, assembly)
        assert relative_error(found, logits) <= EXACT


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_batches_may_have_contexts_but_not_final_blocks_of_different_lengths(
    kind: str, assembly: Literal["relay", "copy"]
) -> None:
    model, options = new_model(kind), Sampling(max_new_tokens=3)
    contexts = placed_context(model, BLOCKS), placed_context(model, BLOCKS[1:2])
    finals = [FINAL_IDS, FINAL_IDS[::-1]]
    prompts = [(c.token_ids, ids) for c, ids in zip(contexts, finals, strict=True)]
    cache = model.cache_for(*contexts, assembly=assembly)
    assert model.generate_batch(prompts, options, cache=cache) == [
        model.generate(*prompt, options, cache=model.cache_for(context, assembly=assembly))
        for prompt, context in zip(prompts, contexts, strict=True)
    ]
    prompts[1] = prompts[1][0], FINAL_IDS[:5]
    cache = model.cache_for(*contexts, assembly=assembly)
    with pytest.raises(ValueError, match="final blocks of 5 to 12 tokens"):
        model.generate_batch(prompts, options, cache=cache)
    # Without a cache, padding is on the left, where no window includes it.
    assert model.generate_batch(prompts, options) == [
        model.generate(*prompt, options) for prompt in prompts
    ]


def test_tokens_are_chosen_by_the_layers_that_see_all_passages() -> None:
    assert measured(new_model("windows")) == [5]
    assert measured(new_llama(num_hidden_layers=6)) == [4, 5]
    assert measured(new_model("windows only")) == [2]
    assert measured(new_model("shared, last tokens only")) == [11]


def test_windows_of_masks_are_measured_to_a_token() -> None:
    hf_model = new_model("windows").hf_model
    with seen_attention(hf_model) as seen:
        probe_cache(hf_model)
    assert [window for window in range(1, 64) if seen[0].has_window(window)] == [16]
    assert [seen[layer].has_window(None) for layer in range(6)] == [False] * 5 + [True]
    assert not any(seen[5].has_window(window) for window in range(1, 64))


def change_kinds(model: BlockModel, change: Callable[[LayerKind], LayerKind | None]) -> None:
    """Replace the measured kinds of a model's layers. None removes a layer."""
    changed = (change(kind) for kind in model.profile.kinds)
    kinds = tuple(kind for kind in changed if kind is not None)
    model.profile = replace(model.profile, kinds=kinds)


def without_window(kind: LayerKind) -> LayerKind:
    return replace(kind, attention="full", window=None)


WRONG_KINDS: dict[str, tuple[str, Callable[[LayerKind], LayerKind | None]]] = {
    "shorter": ("windows", lambda k: replace(k, window=k.window and k.window - 1)),
    "longer": ("windows", lambda k: replace(k, window=k.window and k.window + 1)),
    "no window": ("windows", without_window),
    # transformers 5.19 has no cache for shared layers, so they are not measured.
    "no shared layers": ("shared", lambda k: None if k.attention == "shared" else k),
}


@pytest.mark.parametrize("name", WRONG_KINDS)
def test_kinds_that_differ_from_the_masks_rule_out_relay(name: str) -> None:
    kind, change = WRONG_KINDS[name]
    model = new_model(kind)
    change_kinds(model, change)
    assert not model.supports_relay


def test_a_window_longer_than_the_probe_rules_out_relay() -> None:
    model = new_model("windows only")
    model.hf_model.config.sliding_window = 64  # more tokens than the probe has
    change_kinds(model, without_window)
    assert not model.supports_relay


def without_masks(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """Attention that takes a window size instead of a mask, like Flash Attention."""
    assert attention_mask is None
    places = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
    apart = places - torch.arange(key.shape[2])
    mask = (apart >= 0) & (apart < (settings["sliding_window"] or key.shape[2]))
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, scale=settings["scaling"], enable_gqa=True
    )
    return output.transpose(1, 2), None


@pytest.mark.parametrize("kind", ["windows", "windows only"])
def test_attention_without_masks_supports_relay(kind: str) -> None:
    AttentionInterface.register("without_masks", without_masks)
    AttentionMaskInterface.register("without_masks", lambda *_, **__: None)
    hf_model = new_model(kind).hf_model
    expected = oracle_logits(hf_model, [*BLOCKS, FINAL_IDS])[-1]
    hf_model.set_attn_implementation("without_masks")
    model = BlockModel(hf_model, tiny_tokenizer(), pack_weights=False)
    assert model.supports_relay
    context = placed_context(model, BLOCKS)
    changed, _ = recompute(model, context, IS_PASSAGE, FINAL_IDS, 1.0)
    for assembly in ASSEMBLIES:
        found = logits_after(model, context, FINAL_IDS, assembly)
        assert relative_error(found, expected) <= EXACT
    blocks = [[token for block in BLOCKS for token in block], FINAL_IDS]
    full = oracle_logits(new_model(kind).hf_model, blocks)[-1]
    assert relative_error(logits_after(model, changed, FINAL_IDS, "relay"), full) <= EXACT


def test_a_soft_cap_that_attention_does_not_receive_rules_out_relay() -> None:
    model = new_model("windows and soft caps")
    for module in model.hf_model.modules():
        if hasattr(module, "attn_logit_softcapping"):
            vars(module)["attn_logit_softcapping"] = None
    assert not model.supports_relay


def test_sinks_that_attention_does_not_receive_rule_out_relay() -> None:
    model = new_model("windows")
    model.hf_model.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    assert not model.supports_relay


@pytest.mark.parametrize("kind", WINDOWED)
def test_a_gpu_copies_for_one_request_to_a_model_without_kernels(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = new_model(kind)
    assert model.choose_assembly("auto", 5) == "relay"
    monkeypatch.setattr(BlockModel, "device", torch.device("cuda"))
    assert model.choose_assembly("auto", 5) == "copy"
    assert model.choose_assembly("auto", 5, [Context(())] * 2) == "relay"


@pytest.mark.parametrize("kind", ["shared", "shared, last tokens only"])
def test_relay_does_not_change_full_mode_of_shared_layers(kind: str) -> None:
    model, answer = new_model(kind), random_ids(5, 7)
    expected = model.answer_logits(BLOCKS[0], FINAL_IDS, answer)
    enable_relay(model.hf_model)
    assert relative_error(model.answer_logits(BLOCKS[0], FINAL_IDS, answer), expected) <= EXACT


@pytest.mark.parametrize("kind", ["shared", "shared, last tokens only"])
def test_speculative_decoding_in_full_mode_does_not_change_answers(kind: str) -> None:
    """Drafted tokens are verified by forward passes that only return the last few logits."""
    ids = random_ids(4, 3)
    expected = new_model(kind).generate([], ids * 2, Sampling(max_new_tokens=10))
    model = new_model(kind)
    enable_relay(model.hf_model)
    guesses = {"prompt_lookup_num_tokens": 3}
    found = model.generate([], ids * 2, Sampling(max_new_tokens=10, extra=guesses))
    assert found == expected


@pytest.mark.parametrize("assembly", ASSEMBLIES)
def test_queries_are_scaled_for_their_own_position(assembly: Literal["relay", "copy"]) -> None:
    """The model scales queries by their position, starting at 1,024 tokens."""
    config = AutoConfig.for_model("ministral3")
    config.rope_parameters |= {
        "original_max_position_embeddings": 1024,
        "llama_4_scaling_beta": 0.5,
    }
    model = BlockModel(miniature(config), tiny_tokenizer(), pack_weights=False)
    assert model.supports_relay
    first, passage, final = random_ids(40, 1), random_ids(1100, 2), FINAL_IDS
    whole = placed_context(model, [[*first, *passage]])
    found = logits_after(model, whole, final, assembly)
    expected = oracle_logits(model.hf_model, [[*first, *passage], final])[-1]
    assert relative_error(found, expected) <= EXACT
    # Tokens are scaled for their position in the passage until they are recomputed.
    parts = placed_context(model, [first, passage])
    context, _ = recompute(model, parts, [False, True], final, 1.0)
    found = logits_after(model, context, final, assembly)
    assert relative_error(found, expected) <= EXACT
