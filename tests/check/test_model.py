"""``check_model`` accepts correct models of each kind, and detects errors in each kind."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag import Recipe
from blockattn_rag.check.model import check_model
from blockattn_rag.check.oracle import segments, state_mixers
from blockattn_rag.kv.context import Context, assemble
from blockattn_rag.kv.rope import Pairing, RotaryLayout
from blockattn_rag.model import BlockModel, caches, context_model, encoding
from blockattn_rag.model.caches import copied_cache
from blockattn_rag.model.kinds import LayerKind, layer_states, storing, summary
from blockattn_rag.model.states import HeadStates
from tests.model.families import KINDS
from tests.model.miniatures import model_of_kinds, new_model
from tests.models import shared_tiny_llama, tiny_tokenizer


def llama(dtype: torch.dtype = torch.float32) -> BlockModel:
    hf_model: Any = copy.deepcopy(shared_tiny_llama())
    return BlockModel(hf_model.to(dtype), tiny_tokenizer())


def failed(model: BlockModel, recipe: Recipe | None = None) -> set[str]:
    return {row.name for row in check_model(model, recipe).rows if not row.passed}


def test_a_supported_model_passes_every_check() -> None:
    report = check_model(llama())
    assert report.passed
    assert report.rows[0].detail == "3 attention; rotation: half x 8; 384 bytes per token"
    layout, *others = report.rows
    assert layout.budget is None
    for row in others:
        assert row.value is not None
        assert row.budget is not None
        assert row.value <= row.budget


def test_tolerances_of_sixteen_bit_models_follow_their_rounding() -> None:
    report = check_model(llama(torch.bfloat16))
    assert report.passed
    budget = report.rows[2].budget
    assert budget is not None
    assert 1e-3 < budget < 0.1


@pytest.mark.parametrize("kind", [None, "latent"])
@pytest.mark.parametrize("fault", ["pairing", "frequencies", "none"])
def test_a_wrong_rotation_fails_for_every_moved_block(kind: str | None, fault: str) -> None:
    model = new_model(kind) if kind else llama()
    right = model.profile.layouts[0]
    other: Pairing = "half" if right.pairing == "interleaved" else "interleaved"
    wrong = {
        "pairing": RotaryLayout(right.frequencies, other),
        "frequencies": RotaryLayout(right.frequencies * 1.1, right.pairing),
        "none": RotaryLayout(torch.empty(0), "half"),
    }[fault]
    model.profile = replace(model.profile, layouts=(wrong,) * 3)
    found = failed(model)
    assert "assembled = oracle" in found
    assert "one block = full attention" not in found


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.bfloat16, 0)])
def test_wrong_value_layer_fails(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: float
) -> None:
    right = assemble

    def wrong(
        context: Context, layouts: Sequence[RotaryLayout], room: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for index, (keys, values) in enumerate(right(context, layouts, room)):
            yield keys, values * factor if index == 1 else values

    monkeypatch.setattr(caches, "assemble", wrong)
    assert "assembled = oracle" in failed(llama(dtype))


def test_unrotated_sink_keys_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "rotate", lambda keys, *_: keys)
    assert failed(llama()) == {"blocks after a sink = oracle"}


def test_a_tokenizer_that_loses_text_fails() -> None:
    model = llama()
    right: Any = model.tokenizer.tokenizer.decode
    model.tokenizer.tokenizer.decode = lambda *args, **kwargs: right(*args, **kwargs)[1:]
    assert failed(model) == {"tokenizer boundary"}


def test_recomputation_is_checked_with_a_recipe_that_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, recipe = llama(), Recipe("bos", recompute=0.1)
    name = "all tokens recomputed = full attention"
    report = check_model(model, recipe)
    assert report.passed
    assert name in {row.name for row in report.rows}
    replacing = "blockattn_rag.model.recompute._ReplacingLayer.update"
    monkeypatch.setattr(replacing, lambda own, *_: (own.keys, own.values))
    assert failed(model, recipe) == {name}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_each_kind_passes_every_check(kind: str) -> None:
    model, (_, _, kinds) = model_of_kinds(kind), KINDS[kind]
    report = check_model(model)
    assert report.passed
    assert summary(model.profile.kinds) == kinds
    assert report.rows[0].detail.startswith(f"{kinds}; rotation: ")
    assert report.rows[0].detail.endswith(f"; {model.bytes_per_token:,} bytes per token")


def test_latent_attention_takes_a_fraction_of_the_bytes_of_its_heads() -> None:
    model = model_of_kinds("latent")
    config = model.config
    heads = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    assert model.bytes_per_token == 3 * 4 * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert model.bytes_per_token < 3 * 4 * heads / 4


def test_kinds_report_what_they_store() -> None:
    every = [LayerKind(), LayerKind("windowed", 8), LayerKind("latent"), LayerKind("shared")]
    every += [LayerKind("none", has_state=True), LayerKind("full", has_state=True)]
    assert storing(every) == [0, 1, 2, 5]
    assert [kind.is_attention for kind in every] == [True, True, False, False, False, False]


@pytest.mark.parametrize("kind", ["state", "state of convolutions", "attention and state"])
def test_a_wrong_or_missing_start_state_fails(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = new_model(kind), HeadStates.start
    monkeypatch.setattr(HeadStates, "start", lambda own, cache, ids: right(own, cache, ids[:-1]))
    assert {"one block = full attention", "assembled = oracle"} <= failed(model)
    monkeypatch.setattr(HeadStates, "start", lambda *_: None)
    assert "assembled = oracle" in failed(model)


def test_a_state_of_the_last_passage_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting from the state of the last passage would be another definition of block mode."""
    model, right = new_model("state"), BlockModel.cache_for

    def last(own: BlockModel, *contexts: Any, **options: Any) -> Any:
        cache: Any = right(own, *contexts, **options)
        if cache is not None:
            ids = contexts[0].blocks[-1].kv.token_ids.tolist()
            own._head_states.start(cache, ids)
        return cache

    monkeypatch.setattr(BlockModel, "cache_for", last)
    found = failed(model)
    assert "assembled = oracle" in found
    assert "one block = full attention" not in found


def test_rotating_the_latent_itself_fails() -> None:
    model = new_model("latent")
    vars(model)["supports_relay"] = False
    plain = tuple(replace(kind, attention="full") for kind in model.profile.kinds)
    model.profile = replace(model.profile, kinds=plain)
    assert "assembled = oracle" in failed(model)


@pytest.mark.parametrize("kind", ["shared", "windows and state"])
def test_a_window_off_by_one_fails(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model(kind)

    def shorter(config: Any, *arguments: Any) -> Any:
        config = copy.deepcopy(config)
        config.sliding_window -= 1
        return copied_cache(config, *arguments)

    monkeypatch.setattr(context_model, "copied_cache", shorter)
    assert "assembled = oracle" in failed(model)


def test_values_of_another_layer_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("shared")

    def turned(cache: Any, kinds: Any) -> Any:
        found = [*layer_states(cache, kinds)]
        return [*found[1:3], found[0], *found[3:]]

    monkeypatch.setattr(encoding, "layer_states", turned)
    assert "assembled = oracle" in failed(model)


def test_segments_of_a_prompt() -> None:
    found = segments(torch.tensor([0, 0, 1, 1, 1, 2, 2]))
    assert [at.tolist() for at, _ in found] == [[0, 1], [2, 3, 4], [0, 1, 5, 6]]
    assert [keeps.tolist() for _, keeps in found][-1] == [False, False, True, True]
    ((at, keeps),) = segments(torch.tensor([0, 0]))
    assert (at.tolist(), keeps.tolist()) == ([0, 1], [True, True])


def test_state_layers_are_detected_by_their_behavior() -> None:
    assert not state_mixers(shared_tiny_llama())
    for kind, count in (("state", 3), ("state of convolutions", 1), ("attention and state", 2)):
        assert len(state_mixers(model_of_kinds(kind).hf_model)) == count
