from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from recipes.hybrid_states import measure, train
from recipes.hybrid_states.model import ATTENTION, STATE, build_model
from recipes.hybrid_states.prompts import KINDS, held_out_prompts
from recipes.hybrid_states.train import main, train_stage


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TOKENS_PER_STEP", 100)
    monkeypatch.setattr(measure, "PASSAGES", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def test_model_has_two_layers_of_each_kind(model: Qwen3_5ForCausalLM) -> None:
    types = model.config.layer_types
    assert types.count(STATE) == types.count(ATTENTION) == 2


def test_questions_are_repeatable_and_mark_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind in KINDS:
        (prompt,) = held_out_prompts(tokenizer, kind, 3, 1, seed=1)
        assert held_out_prompts(tokenizer, kind, 3, 1, seed=1) == [prompt]
        assert len(prompt.blocks) == 5
        marked = [token for token, w in zip(prompt.blocks[-1], prompt.weights, strict=True) if w]
        text = tokenizer.decode(marked)
        assert text.startswith("The ")
        assert text.endswith(".<|end|>")


def test_an_interrupted_stage_ends_with_the_same_weights(
    bundled: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    models = [build_model(bundled) for _ in range(3)]
    ignore = lambda _: None  # noqa: E731
    assert train_stage(models[0], tokenizer, "last", 2, tmp_path / "once.pt", log=ignore)
    parts = tmp_path / "parts.pt"
    assert not train_stage(models[1], tokenizer, "last", 2, parts, until=0.0, log=ignore)
    assert train_stage(models[2], tokenizer, "last", 2, parts, log=ignore)
    whole, resumed = (model.state_dict() for model in (models[0], models[2]))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    before = build_model(bundled).state_dict()
    assert not torch.equal(whole["lm_head.weight"], before["lm_head.weight"])


def test_every_model_is_trained_and_every_treatment_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(tmp_path / "out", full_steps=2, block_steps=2)
    main(tmp_path / "out", full_steps=2, block_steps=2)  # nothing is left to do
    output = tmp_path / "rows.json"
    capsys.readouterr()
    measure.main(tmp_path / "out", samples=2, output=output)
    rows = json.loads(output.read_text(encoding="utf-8"))
    ways = {(row["trained"], row["treatment"], row["promote"]) for row in rows}
    assert len(ways) == 9 + 5 + 2 + 2
    assert len(rows) == len(ways) * len(KINDS)
    assert all(0 <= row["low"] <= row["accuracy"] <= row["high"] <= 1 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(ways)
    assert lines[2].startswith("| full | - (full mode) | - | ")
