"""``check_model`` accepts correct models and rejects incorrect ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag import Recipe
from blockattn_rag.check.model import CheckReport, check_model
from blockattn_rag.kv.context import Context, assemble
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.model import BlockModel, caches, encoding
from tests.models import shared_tiny_llama, tiny_tokenizer


@pytest.fixture
def model() -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer())


def failed(report: CheckReport) -> set[str]:
    return {row.name for row in report.rows if not row.passed}


def test_a_supported_model_passes_every_check(model: BlockModel) -> None:
    report = check_model(model)
    assert report.passed
    assert not failed(report)
    assert report.rows[0].detail == "3 attention; rotation: half x 8; 384 bytes per token"
    layout, *others = report.rows
    assert layout.budget is None
    for row in others:
        assert row.value is not None
        assert row.budget is not None
        assert row.value <= row.budget


def test_tolerances_of_sixteen_bit_models_follow_their_rounding() -> None:
    model = BlockModel(copy.deepcopy(shared_tiny_llama()).bfloat16(), tiny_tokenizer())
    report = check_model(model)
    assert report.passed
    budget = report.rows[2].budget
    assert budget is not None
    assert 1e-3 < budget < 0.1


@pytest.mark.parametrize("fault", ["pairing", "frequencies", "none"])
def test_a_wrong_layout_fails_for_every_moved_block(model: BlockModel, fault: str) -> None:
    right = model.profile.layouts[0]
    wrong = {
        "pairing": RotaryLayout(right.frequencies, "interleaved"),
        "frequencies": RotaryLayout(right.frequencies * 1.1, "half"),
        "none": RotaryLayout(torch.empty(0), "half"),
    }[fault]
    model.profile = replace(model.profile, layouts=(wrong,) * 3)
    report = check_model(model)
    assert not report.passed
    assert "assembled = oracle" in failed(report)
    assert "one block = full attention" not in failed(report)


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1.01), (torch.bfloat16, 0)])
def test_wrong_value_layer_fails(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, factor: float
) -> None:
    hf_model: Any = copy.deepcopy(shared_tiny_llama())
    model = BlockModel(hf_model.to(dtype), tiny_tokenizer())
    right = assemble

    def wrong(
        context: Context, layouts: Sequence[RotaryLayout], room: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for index, (keys, values) in enumerate(right(context, layouts, room)):
            yield keys, values * factor if index == 1 else values

    monkeypatch.setattr(caches, "assemble", wrong)
    assert "assembled = oracle" in failed(check_model(model))


def test_unrotated_sink_keys_fail(model: BlockModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "rotate", lambda keys, *_: keys)
    assert failed(check_model(model)) == {"blocks after a sink = oracle"}


def test_a_tokenizer_that_loses_text_fails(model: BlockModel) -> None:
    right: Any = model.tokenizer.tokenizer.decode
    model.tokenizer.tokenizer.decode = lambda *args, **kwargs: right(*args, **kwargs)[1:]
    assert failed(check_model(model)) == {"tokenizer boundary"}


def test_recomputation_is_checked_with_a_recipe_that_uses_it(
    model: BlockModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, name = Recipe("bos", recompute=0.1), "all tokens recomputed = full attention"
    report = check_model(model, recipe)
    assert report.passed
    assert name in {row.name for row in report.rows}
    monkeypatch.setattr("blockattn_rag.model.recompute._compute", lambda *_: None)
    assert failed(check_model(model, recipe)) == {name}
