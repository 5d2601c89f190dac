"""``blockattn-rag train``."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest

from blockattn_rag.app.cli.train import train
from blockattn_rag.lab.training.config import FinetuneConfig
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


def test_train_writes_a_tuned_model(cli: Command, model: Path, data: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    command = ("train", "--model", model, "--data", data, "--output", tuned, "--batch-size", 2)
    output = cli(*command, "--json")
    assert output.status == 0, output.stderr
    assert output.json["steps"] == 4
    assert cli("check", tuned, "--json").json["block_tuned"]
    data.write_text(data.read_text() + "{}\n", encoding="utf-8")
    output = cli(*command, "--overwrite")
    assert (output.status, "line 5" in output.stderr) == (1, True)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_reports_losses_by_mode(cli: Command, model: Path, data: Path, tmp_path: Path) -> None:
    command = ("train", "--model", model, "--data", data, "--output", tmp_path / "tuned", "--lora",
               "--batch-size", 4, "--overwrite")  # fmt: skip
    last = cli(*command, "--eval-data", data).stdout.splitlines()[-1]
    assert last.startswith("Loss on the evaluation data: block mode ")
    assert last.count(" before, ") == 2
    losses = cli(*command, "--eval-data", data, "--json").json["eval_losses"]
    assert [(mode, set(of)) for mode, of in losses.items()] == [
        (mode, {"before", "after"}) for mode in ("block", "full")
    ]
    without = cli(*command).stdout
    assert "pass --eval-data" in without.splitlines()[-1]
    assert f"The adapter is in {tmp_path / 'tuned'}." in without


def test_train_has_the_defaults_of_the_config() -> None:
    settings = FinetuneConfig(model="m", output="o", train_data=["d"])
    options = inspect.signature(train).parameters
    same = set(options) - {"model", "output", "data", "eval_data", "as_json"}
    assert {name: options[name].default for name in same} == {
        name: getattr(settings, name) for name in same
    }


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FinetuneConfig]:
    """The configs of the runs that commands start; each run ends at once with an error, "seen"."""
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
        "--overwrite",
    )  # fmt: skip
    assert "seen" in output.stderr
    cli("train", *LEAST, "--resume")
    assert runs == [
        FinetuneConfig(
            "bundled", Path("out"), [Path("a"), Path("b")], eval_data=[Path("c")], epochs=1.5,
            learning_rate=0.5, batch_size=5, blocks_per_turn=2, lora=True, bf16=True,
            gradient_checkpointing=True, overwrite=True,
        ),
        FinetuneConfig("bundled", Path("out"), [Path("a")], resume=True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--learning-rate", 0), 1, "learning_rate is 0.0, expected above 0"),
        (("--resume", "--overwrite"), 1, "resume and overwrite cannot be combined"),
        (("--batch-size", 0), 2, "--batch-size"),
    ],
)
def test_a_bad_setting_is_refused_by_name(
    cli: Command, runs: list[FinetuneConfig], options: tuple[object, ...], status: int, message: str
) -> None:
    output = cli("train", *LEAST, *options)
    assert (output.status, runs) == (status, [])
    assert message in output.stderr
