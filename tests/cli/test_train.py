from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from blockattn_rag.cli.train import train
from blockattn_rag.training.config import FinetuneConfig, LoraConfig
from tests.cli.conftest import Command


def test_train_writes_a_model_that_is_known_to_be_block_tuned(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    sample = {
        "question": "How high?",
        "passages": [{"title": "Tower", "text": "It is 214 metres high."}],
        "answer": "214 metres",
    }
    data.write_text((json.dumps(sample) + "\n") * 4 + "{}\n", encoding="utf-8")
    command = ("train", "--model", model, "--data", data, "--output", tmp_path / "tuned",
               "--max-steps", 2, "--batch-size", 2, "--json")  # fmt: skip
    output = cli(*command)
    assert (output.status, "line 5" in output.stderr) == (1, True)
    output = cli(*command, "--on-error", "skip", "--overwrite")
    assert output.status == 0, output.stderr
    assert output.json["steps"] == 2
    assert len(output.json["skipped"]) == 1
    assert cli("check", tmp_path / "tuned", "--json").json["block_tuned"]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_end_with_their_losses_by_mode_before_and_after(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    sample = {"question": "How high?", "passages": [{"text": "214 metres"}], "answer": "214"}
    data.write_text((json.dumps(sample) + "\n") * 2, encoding="utf-8")
    command = ("train", "--model", model, "--data", data, "--output", tmp_path / "tuned", "--lora",
               "--max-steps", 1, "--batch-size", 2, "--overwrite")  # fmt: skip
    last = cli(*command, "--eval-data", data).stdout.splitlines()[-1]
    assert last.startswith("Loss on the answers of the evaluation data: block mode ")
    assert last.count(" before, ") == 2
    losses = cli(*command, "--eval-data", data, "--json").json["eval_losses"]
    assert [(mode, set(of)) for mode, of in losses.items()] == [
        (mode, {"before", "after"}) for mode in ("block", "full")
    ]
    without = cli(*command)
    assert "losses by mode are not known" in without.stdout.splitlines()[-1]
    assert f"The adapter is in {tmp_path / 'tuned'}." in without.stdout


def test_train_has_an_option_for_every_setting() -> None:
    names = {field.name for field in dataclasses.fields(FinetuneConfig)}
    adapters = {field.name for field in dataclasses.fields(LoraConfig)}
    expected = names - {"train_data"} | {"data"}
    expected |= {f"lora_{name}" for name in adapters - {"target_modules"} | {"target"}}
    assert inspect.signature(train).parameters.keys() == expected | {"as_json"}


def test_train_has_the_defaults_of_the_settings() -> None:
    defaults = {name: p.default for name, p in inspect.signature(train).parameters.items()}
    for field in dataclasses.fields(FinetuneConfig):
        if field.default is dataclasses.MISSING or field.name in ("modes", "lora", "eval_data"):
            continue
        assert getattr(defaults[field.name], "value", defaults[field.name]) == field.default
    settings = FinetuneConfig(model="m", output="o", train_data=["d"])
    assert tuple(defaults["modes"].split(",")) == settings.modes


def test_options_of_adapters_alone_are_refused(cli: Command, model: Path) -> None:
    for option in (("--lora-rank", 3), ("--lora-target", "all-linear")):
        output = cli("train", "--model", model, "--data", "x", "--output", "y", *option)
        assert (output.status, "need --lora" in output.stderr) == (1, True)


@pytest.mark.parametrize(
    ("options", "adapters"),
    [
        ((), None),
        (("--lora",), LoraConfig()),
        (
            ("--lora", "--lora-rank", 4, "--lora-dropout", 0.5, "--lora-target", "q_proj",
             "--lora-target", "v_proj"),
            LoraConfig(rank=4, alpha=8, dropout=0.5, target_modules=("q_proj", "v_proj")),
        ),
        (("--lora", "--lora-alpha", 3), LoraConfig(alpha=3)),
    ],
)  # fmt: skip
def test_options_of_adapters_reach_the_run(
    cli: Command,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    adapters: LoraConfig | None,
) -> None:
    seen: list[FinetuneConfig] = []

    def stop(config: FinetuneConfig) -> None:
        seen.append(config)
        raise ValueError("seen")

    monkeypatch.setattr("blockattn_rag.training.finetune.finetune", stop)
    output = cli("train", "--model", model, "--data", "x.jsonl", "--output", "y", *options,
                 "--blocks-per-turn", 3)  # fmt: skip
    assert (output.status, "seen" in output.stderr) == (1, True)
    assert (seen[0].lora, seen[0].blocks_per_turn) == (adapters, 3)
