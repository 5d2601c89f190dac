"""``check_model`` reports the kinds of layers, and detects errors in each kind."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from blockattn_rag.check.model import check_model
from blockattn_rag.check.segments import segments, state_mixers
from blockattn_rag.kv.rope import Pairing, RotaryLayout
from blockattn_rag.model import BlockModel, block_model, encoding
from blockattn_rag.model.caches import copied_cache
from blockattn_rag.model.kinds import LayerKind, layer_states, storing, summary
from blockattn_rag.model.states import HeadStates
from tests.model.families import KINDS
from tests.model.miniatures import model_of_kinds, new_model
from tests.models import shared_tiny_llama


def failed(model: BlockModel) -> set[str]:
    return {row.name for row in check_model(model).rows if not row.passed}


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
def test_a_wrong_start_state_fails(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = new_model(kind), HeadStates.start
    monkeypatch.setattr(HeadStates, "start", lambda own, cache, ids: right(own, cache, ids[:-1]))
    found = failed(model)
    assert {"one block = full attention", "assembled = oracle"} <= found


def test_a_missing_start_state_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadStates, "start", lambda *_: None)
    assert "assembled = oracle" in failed(new_model("state"))


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


@pytest.mark.parametrize("fault", ["pairing", "frequencies", "none"])
def test_a_wrong_rotation_of_the_latent_key_fails(fault: str) -> None:
    model = new_model("latent")
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

    monkeypatch.setattr(block_model, "copied_cache", shorter)
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
