from __future__ import annotations

from pathlib import Path

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM

from recipes.bundled_model import train as module
from recipes.bundled_model.train import SMOKE, block_finetune, curriculum, main, train_base


def test_prompts_grow_with_progress() -> None:
    longest = [curriculum(progress)[0][1] for progress in (0.0, 0.3, 0.9)]
    assert longest == sorted(longest) == [3, 5, 10]


@pytest.mark.timeout(600)
def test_a_smoke_run_learns_and_ends_in_an_ordinary_model(tmp_path: Path) -> None:
    """Run all four stages briefly; the loss must fall, and held-out accuracy must rise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        report = train_base(tmp_path / "base", SMOKE, log=lambda _: None)
        block_finetune(tmp_path / "base", tmp_path / "out", SMOKE)
    finally:
        torch.set_num_threads(threads)
    for losses in (report.warm_up, report.task):
        assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert len(report.late) == SMOKE.late_steps
    for name, before in report.before.items():
        assert report.after[name].tokens > before.tokens + 0.2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.block_attention["modes"] == ["block", "full"]


@pytest.mark.parametrize("name", ["out", "out-base", "out-data.jsonl", "out.work"])
def test_existing_files_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    trained: list[str] = []
    monkeypatch.setattr(module, "train_base", lambda *_: trained.append("base"))
    monkeypatch.setattr(module, "block_finetune", lambda *_: trained.append("out"))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    out, existing = tmp_path / "out", tmp_path / name
    existing.mkdir()
    with pytest.raises(typer.BadParameter, match=name):
        main(out)
    assert not trained
    if name == "out-base":  # with --base, this folder is read instead of written
        main(out, base=existing)
        assert trained == ["out"]
    existing.rmdir()
    main(out)
    assert trained[-2:] == ["base", "out"]
