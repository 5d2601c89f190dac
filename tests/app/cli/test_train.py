from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.app.cli.train import train
from blockattn_rag.lab.training.config import FinetuneConfig
from tests.app.cli.conftest import Command


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


def test_a_model_that_was_trained_after_a_sink_runs_with_it(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "train.jsonl"
    sample = {"question": "How high?", "passages": [{"text": "214 metres"}], "answer": "214"}
    data.write_text((json.dumps(sample) + "\n") * 2, encoding="utf-8")
    command = ("train", "--model", model, "--data", data, "--output", tmp_path / "tuned",
               "--max-steps", 1, "--batch-size", 2)  # fmt: skip
    output = cli(*command, "--sink", "bos")
    assert f"blockattn-rag eval --model {tmp_path / 'tuned'} --data FILE" in output.stdout
    tuned = BlockAttentionEngine.from_pretrained(str(tmp_path / "tuned"))
    assert tuned.recipe.sink == "bos"


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
    assert inspect.signature(train).parameters.keys() == names | {"as_json"}


def test_train_has_the_defaults_of_the_settings() -> None:
    defaults = {name: p.default for name, p in inspect.signature(train).parameters.items()}
    for field in dataclasses.fields(FinetuneConfig):
        if field.default is dataclasses.MISSING or field.name in ("modes", "eval_data"):
            continue
        assert defaults[field.name] == field.default
    settings = FinetuneConfig(model="m", output="o", train_data=["d"])
    assert tuple(defaults["modes"].split(",")) == settings.modes


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FinetuneConfig]:
    """The configs of the runs that commands start; each run ends at once with an error, "seen"."""
    configs: list[FinetuneConfig] = []

    def stop(config: FinetuneConfig) -> None:
        configs.append(config)
        raise ValueError("seen")

    monkeypatch.setattr("blockattn_rag.lab.training.finetune.finetune", stop)
    return configs


def test_every_option_reaches_the_setting_of_its_name(
    cli: Command, runs: list[FinetuneConfig]
) -> None:
    given: dict[str, object] = {
        "model": "bundled", "output": "out", "train_data": ["a", "b"], "eval_data": ["c"],
        "modes": "full, block", "positions": "composite", "sink": "bos",
        "prompt_format": "turborag",
        "blocks_per_turn": 2, "on_error": "skip", "max_tokens": 3, "epochs": 1.5, "max_steps": 4,
        "learning_rate": 0.5, "lr_scheduler": "cosine", "batch_size": 5,
        "per_device_batch_size": 6, "warmup_steps": 7, "adam_beta2": 0.75, "lora": True,
        "lora_rank": 4, "dtype": "bfloat16", "bf16": True, "gradient_checkpointing": True,
        "seed": 8, "eval_steps": 9, "save_steps": 11, "overwrite": True, "progress": False,
    }  # fmt: skip
    assert given.keys() == {field.name for field in dataclasses.fields(FinetuneConfig)} - {"resume"}
    arguments: list[object] = []
    for name, value in given.items():
        flag = "data" if name == "train_data" else name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, list) else [value]
            arguments += (part for value in values for part in (f"--{flag}", value))
    assert "seen" in cli("train", *arguments).stderr
    expected = {
        **given, "output": Path("out"), "train_data": [Path("a"), Path("b")],
        "eval_data": [Path("c")], "modes": ("full", "block"),
    }  # fmt: skip
    assert [runs[0]] == [FinetuneConfig(**expected)]  # type: ignore[arg-type]
    least = ("--model", "bundled", "--data", "a", "--output", "out")
    cli("train", *least, "--resume")
    assert runs[1] == FinetuneConfig("bundled", Path("out"), [Path("a")], resume=True)


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (("--lr-scheduler", "step"), 1, "lr_scheduler must be of ('linear', 'cosine', 'constant')"),
        (("--positions", "any"), 1, "positions must be of ('reordered', 'composite'), found 'any'"),
        (("--learning-rate", 0), 1, "learning_rate is 0.0, expected above 0"),
        (("--adam-beta2", 1), 1, "expected adam_beta2 below 1"),
        (("--on-error", "pass"), 2, "--on-error"),
        (("--batch-size", 0), 2, "--batch-size"),
        (("--lora", "--lora-rank", 0), 2, "--lora-rank"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(
    cli: Command,
    runs: list[FinetuneConfig],
    options: tuple[object, ...],
    status: int,
    message: str,
) -> None:
    least = ("--model", "bundled", "--data", "a", "--output", "out")
    output = cli("train", *least, *options)
    assert (output.status, runs) == (status, [])
    assert message in output.stderr
