"""The commands ``eval`` and ``plan``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.planning import shape_config
from tests.app.cli.conftest import Command
from tests.lab.evaluation.samples import record, write_jsonl


def test_eval_scores_recipes_and_resumes(cli: Command, model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [record(i) for i in range(1, 3)])
    records = tmp_path / "records.jsonl"
    command = ("eval", "--model", model, "--data", data, "--recipes", "none",
               "--max-new-tokens", 2, "--output", records)  # fmt: skip
    report = cli(*command, "--json")
    assert [row["mode"] for row in report.json["rows"]] == ["full", "none"]
    assert report.json["rows"][1]["samples"] == 2
    assert "Cut off: 4 of 4 answers (2 in full, 2 in none)" in report.stderr
    lines = records.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 5
    assert [row["cut_off"] for row in report.json["rows"]] == [2, 2]
    shown = cli(*command).stdout
    assert records.read_text(encoding="utf-8").splitlines() == lines
    for name in ("accuracy", "exact", "F1", "diff", "same", "reused"):  # the legend
        assert f"{name}:" in shown


def test_eval_uses_format_of_checkpoint(cli: Command, model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "hxia7" / "Llama-3.2-1B-Block-FT")
    data = write_jsonl(tmp_path / "data.jsonl", [record(1)])
    command = ("eval", "--data", data, "--max-new-tokens", 2, "--json")
    known, stock = cli(*command, "--model", copy), cli(*command, "--model", model)
    assert known.json["settings"]["prompt_format"] == "llama3-block"
    said = "note: hxia7/Llama-3.2-1B-Block-FT: prompt format llama3-block, which it was trained"
    assert known.stderr.count("prompt format") == 1
    assert said in known.stderr
    assert stock.json["settings"]["prompt_format"] == "chat"
    assert "prompt format" not in stock.stderr


def test_eval_compares_predictions(cli: Command, model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [record(1), record(2)])
    command = ("eval", "--model", model, "--data", data, "--max-new-tokens", 3, "--fidelity",
               "--recipes", "none,head:4")  # fmt: skip
    output = ("--output", tmp_path / "out.jsonl")
    found = cli(*command, *output, "--json").json
    assert [row["mode"] for row in found["rows"]] == ["floor", "none", "head:4"]
    assert set(found["rows"][2]["recovery"]) == {"mean", "low", "high"}
    assert len((tmp_path / "out.jsonl").read_text("utf-8").splitlines()) == 1 + 3 * 2
    shown = cli(*command, *output).stdout
    assert "head:4" in shown
    assert "recovered" in shown
    int8 = cli(*command, "--kv-dtype", "int8", "--json").json
    assert int8["settings"]["kv_dtype"] == "int8"
    assert int8["rows"][1]["kl"] != found["rows"][1]["kl"]


def test_eval_compares_folders_of_recipes(cli: Command, model: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [record(1)])
    folder = tmp_path / "recipe"
    Recipe("head:4").save(folder)
    command = ("eval", "--model", model, "--data", data, "--max-new-tokens", 2, "--json")
    rows = cli(*command, "--recipes", f"none,{folder},head:4", "--fidelity").json["rows"]
    found = {row.pop("mode"): row for row in rows}
    assert found[str(folder)] == found["head:4"] != found["none"]
    answers = cli(*command, "--recipes", f"{folder},head:4").json["rows"]
    assert answers[1]["accuracy"] == answers[2]["accuracy"]


def test_eval_replays_a_log_of_prompts(cli: Command, model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    prompts = [["You answer.", f"Tower {n} is high.", "How high?"] for n in range(2)]
    log.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in prompts), "utf-8")
    command = ("eval", "--model", model, "--log", log, "--max-new-tokens", 3,
               "--recipes", "none,bos", "--output", tmp_path / "out.jsonl")  # fmt: skip
    found = cli(*command, "--json").json
    assert [row["mode"] for row in found["rows"]] == ["floor", "none", "bos"]
    assert [row["samples"] for row in found["rows"]] == [2, 2, 2]
    assert found["rows"][0]["identical"]["mean"] == 1
    lines = (tmp_path / "out.jsonl").read_text("utf-8").splitlines()
    shown = cli(*command).stdout
    assert "2 prompts" in shown
    assert (tmp_path / "out.jsonl").read_text("utf-8").splitlines() == lines


def test_eval_recommends_a_recipe_for_a_database(
    cli: Command, database: Path, tmp_path: Path
) -> None:
    lines = [{"question": f"How high is Tower {n}?"} for n in range(2)]
    questions = write_jsonl(tmp_path / "questions.jsonl", lines)
    command = ("eval", "--db", database, "--questions", questions, "--max-new-tokens", 2)
    found = cli(*command, "--json")
    names = ["full", "head+recompute:0.1", "fast"]
    assert [row["name"] for row in found.json["rows"]] == names
    assert found.json["rows"][1]["right"] is None
    shown = cli(*command).stdout
    assert "right" not in shown
    assert "of the tokens of full mode's answers" in shown.splitlines()[-1]
    assert shown.splitlines()[-1].endswith("(2 questions: too few to rely on).")
    write_jsonl(questions, [{**line, "answers": ["214"]} for line in lines])
    labelled = cli(*command, "--json").json
    assert [row["name"] for row in labelled["rows"]] == [*names, "closed-book"]
    assert labelled["with_answers"] == 2
    shown = cli(*command).stdout
    assert "gain" in shown


def test_plan_estimates_a_collection_without_weights(cli: Command, tmp_path: Path) -> None:
    shape_config("tiny").save_pretrained(tmp_path)
    command = ("plan", "--passages", 10, "--tokens", 100, "--model", tmp_path, "--tflops", 1)
    output = cli(*command, "--json")
    assert output.json["passage_bytes"] == 100 * 256
    assert [tier["name"] for tier in output.json["tiers"]] == ["memory", "disk"]
    shown = cli(*command, "--gpu-memory", 1)
    assert "all" in shown.stdout
    assert "gpu" in shown.stdout


def test_plan_uses_the_dtype_that_the_model_is_loaded_with(cli: Command) -> None:
    command = ("plan", "--passages", 10, "--model", "135m", "--tflops", 1, "--json")
    assert cli(*command).json["dtype"] == "float32"
    assert cli(*command, "--gpu-memory", 8).json["dtype"] == "bfloat16"
    assert cli(*command, "--dtype", "float16").json["dtype"] == "float16"


def test_plan_estimates_int8(cli: Command) -> None:
    command = ("plan", "--passages", 10, "--tokens", 512, "--model", "8b", "--tflops", 1)
    shown = cli(*command, "--dtype", "bfloat16", "--kv-dtype", "int8", "--json").json
    assert shown["kv_dtype"] == "int8"
    assert shown["passage_bytes"] < 0.53 * (64 << 20)
    table = cli(*command, "--kv-dtype", "int8").stdout
    assert "blocks in int8" in table
    assert "MiB/s, reading from a store is slower than a full prefill" in table


def test_plan_without_the_gpu_needs_its_speed(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    output = cli("plan", "--passages", 10, "--model", "8b", "--gpu-memory", 80, status=1)
    assert "--tflops" in output.stderr
