from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from recipes.hybrid_states import measure, train
from recipes.hybrid_states.model import ATTENTION, STATE, build_model
from recipes.hybrid_states.prompts import KINDS, held_out_prompts
from recipes.hybrid_states.train import imitation_loss, main, task_loss, train_stage


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "TOKENS_PER_STEP", 100)
    monkeypatch.setattr(measure, "PASSAGES", 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def _quiet(_: str) -> None:
    pass


def test_model_has_two_layers_of_each_kind(model: Qwen3_5ForCausalLM) -> None:
    types = model.config.layer_types or []
    assert types.count(STATE) == types.count(ATTENTION) == 2


def test_questions_are_repeatable_and_mark_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    for kind in KINDS:
        (prompt,) = held_out_prompts(tokenizer, kind, 3, 1, seed=1)
        assert held_out_prompts(tokenizer, kind, 3, 1, seed=1) == [prompt]
        assert len(prompt.blocks) == 5
        marked = [token for token, w in zip(prompt.blocks[-1], prompt.weights, strict=True) if w]
        text = str(tokenizer.decode(marked))
        assert text.startswith("The ")
        assert text.endswith(".<|end|>")


def test_imitation_brings_state_layers_closer_to_attention(
    model: Qwen3_5ForCausalLM,
    bundled: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    loss = imitation_loss(model, tokenizer, bundled)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = loss(0).item()
    assert train_stage(model, loss, 10, 3e-3, tmp_path / "imitation.pt", log=_quiet)
    assert loss(0).item() < first
    after = model.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed
    assert all("linear_attn" in name for name in changed)


def test_an_interrupted_stage_ends_with_the_same_weights(
    bundled: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    def run(model: Qwen3_5ForCausalLM, file: str, **options: float) -> bool:
        loss = task_loss(model, tokenizer, "last")
        return train_stage(model, loss, 2, 1e-3, tmp_path / file, log=_quiet, **options)

    models = [build_model(bundled) for _ in range(3)]
    assert run(models[0], "once.pt")
    assert not run(models[1], "parts.pt", until=0.0)
    assert run(models[2], "parts.pt")
    complete, interrupted, resumed = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in complete.items())
    assert not torch.equal(complete["lm_head.weight"], interrupted["lm_head.weight"])


def test_every_model_is_trained_and_every_treatment_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(tmp_path / "out", minutes=0, smoke=True)
    assert "again to continue" in capsys.readouterr().out
    main(tmp_path / "out", smoke=True)
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
