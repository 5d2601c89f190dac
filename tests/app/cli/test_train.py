from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from blockattn_rag.app.cli.train import train
from blockattn_rag.lab.training.config import FinetuneConfig
from blockattn_rag.lab.training.data import DataReport
from blockattn_rag.lab.training.report import FinetuneReport
from tests.app.cli.conftest import Command

SAMPLE = {
    "question": "How high?",
    "passages": [{"title": "Tower", "text": "It is 214 metres high."}],
    "answer": "214 metres",
}
LEAST = ("--model", "bundled", "--data", "a", "--output", "out")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text((json.dumps(SAMPLE) + "\n") * 4, encoding="utf-8")
    return file


def test_train_saves_a_fine_tuned_model(
    cli: Command, model: Path, data: Path, tmp_path: Path
) -> None:
    tuned = tmp_path / "tuned"
    command = ("train", "--model", model, "--data", data, "--output", tuned, "--batch-size", 2)
    output = cli(*command, "--json")
    assert output.json["steps"] == 4
    assert cli("check", tuned, "--json").json["block_tuned"]
    data.write_text(data.read_text() + "{}\n", encoding="utf-8")
    output = cli(*command[:-4], "--output", tmp_path / "other", status=1)
    assert "line 5" in output.stderr


@pytest.mark.parametrize("evaluated", [True, False])
def test_the_report_has_the_losses_by_mode(
    cli: Command, monkeypatch: pytest.MonkeyPatch, evaluated: bool
) -> None:
    losses = [{"eval_block_loss": 2.0, "eval_full_loss": 1.5, "step": step} for step in (0, 3)]
    history = [*losses[:1], {"loss": 1.0, "step": 3}, {**losses[1], "eval_block_loss": 1.0}]
    report = FinetuneReport(
        Path("out"), 3, 1.0, 1.0, DataReport(), history if evaluated else history[1:2]
    )
    monkeypatch.setattr("blockattn_rag.lab.training.finetune.finetune", lambda _: report)
    output = cli("train", *LEAST, "--lora")
    last = output.stdout.splitlines()[-1]
    assert output.stdout.startswith("The adapter is in out.")
    by_mode = cli("train", *LEAST, "--json").json["eval_losses"]
    if evaluated:
        assert "block mode 2.0000 before, 1.0000 after; full mode 1.5000 before" in last
        assert by_mode["block"] == {"before": 2.0, "after": 1.0}
    else:
        assert "pass --eval-data" in last
        assert by_mode == {}


def test_options_default_to_those_of_the_config() -> None:
    settings = FinetuneConfig(model="m", output="o", train_data=["d"])
    options = inspect.signature(train).parameters
    same = set(options) - {"model", "output", "data", "eval_data"}
    assert {name: options[name].default for name in same} == {
        name: getattr(settings, name) for name in same
    }


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FinetuneConfig]:
    """Configs of the training runs that commands start. Each run fails at once with "seen"."""
    configs: list[FinetuneConfig] = []

    def stop(config: FinetuneConfig) -> None:
        configs.append(config)
        raise ValueError("seen")

    monkeypatch.setattr("blockattn_rag.lab.training.finetune.finetune", stop)
    return configs


def test_every_option_reaches_the_config(cli: Command, runs: list[FinetuneConfig]) -> None:
    output = cli(
        "train", *LEAST, "--data", "b", "--eval-data", "c", "--epochs", 1.5, "--learning-rate", 0.5,
        "--batch-size", 5, "--blocks-per-turn", 2, "--lora", "--bf16", "--gradient-checkpointing",
        status=1,
    )  # fmt: skip
    assert "seen" in output.stderr
    assert runs == [
        FinetuneConfig(
            "bundled", Path("out"), [Path("a"), Path("b")], eval_data=[Path("c")], epochs=1.5,
            learning_rate=0.5, batch_size=5, blocks_per_turn=2, lora=True, bf16=True,
            gradient_checkpointing=True,
        ),
    ]  # fmt: skip
