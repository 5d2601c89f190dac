"""``blockattn-rag repair`` with a database and with files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.app.cli.repair import _lexical
from blockattn_rag.app.rag.database import MANIFEST
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.lab.repair import run, stages
from blockattn_rag.prompts.formats import Passage
from blockattn_rag.store import DirectoryStore
from tests.app.cli.conftest import Command
from tests.lab.evaluation.samples import write_jsonl
from tests.lab.repair.runs import FAST, QUICK

PASSAGES = [{"title": f"t{n}", "text": f"fact {n} is {n * 7 % 5}"} for n in range(6)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit repairs to seconds, with a plan that does not depend on the speed of the machine."""
    own = run.repair

    def repair(*args: Any, **options: Any) -> Any:
        return own(*args, **options, limits=replace(QUICK, passages=2, samples=4))

    monkeypatch.setattr(run, "repair", repair)
    monkeypatch.setattr(stages.Repair, "speeds", lambda *_: FAST)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    records = [{"question": f"how high is tower {n}?", "answers": ["e", "a"]} for n in range(12)]
    return write_jsonl(tmp_path / "questions.jsonl", records)


def test_a_repaired_database_is_queried_with_its_recipe(
    cli: Command, ingest: Command, questions: Path, tmp_path: Path
) -> None:
    db = tmp_path / "db"
    ingest("--recipe", "none")
    output = cli("repair", "--db", db, "--questions", questions)
    written, kept, divergence, agreement, right, use = output.stdout.splitlines()
    assert kept.startswith("Target: keep 95 % of full mode's answers. Kept: ")
    recipe = Recipe.load(db / "recipe")
    assert written.startswith(f"Recipe {recipe} written to {db / 'recipe'} in ")
    assert divergence.startswith("Divergence from full mode (KL), 3 held-out questions: 0.")
    assert agreement.startswith("Token agreement with full mode: ")
    assert right.startswith("Right answers: full ")
    assert use == "2 of 2 passages re-encoded. `ask` now uses it."
    # Without a terminal, one line is printed when a stage starts.
    stages = ["full mode's answers", "fitting in closed form", "training", "choosing",
              "measuring", "right answers", "re-encoding passages"]  # fmt: skip
    begun = [line.partition(" (")[0] for line in output.stderr.splitlines()]
    # If the machine has become faster, more answers are computed before the training.
    assert list(dict.fromkeys(name for name in begun if name in stages)) == stages
    assert recipe.prompt_format == "ask"
    assert not (db / "recipe.work").exists()
    assert json.loads((db / MANIFEST).read_text())["recipe"] == "auto"
    answer = cli("ask", "How high is it?", "--db", db, "--max-new-tokens", 2, "--json")
    assert answer.json["misses"] <= 1  # the text before the passages
    assert answer.json["hits"] >= 2
    assert "recipe" not in answer.stderr


def test_the_report_names_the_model_of_the_recipe(
    cli: Command, ingest: Command, model: Path, questions: Path, tmp_path: Path
) -> None:
    db = tmp_path / "db"
    ingest("--dtype", "bfloat16")
    output = cli("repair", "--db", db, "--questions", questions, "--model", model)
    assert output.stdout.splitlines()[-1].endswith(f"`ask --model {model}` now uses it.")
    asking = ("ask", "How high is it?", "--db", db, "--max-new-tokens", 2)
    assert "Skipped" not in cli(*asking, "--model", model).stderr


def test_blocks_encoded_with_other_recipes_are_deleted_from_the_database(
    cli: Command, ingest: Command, questions: Path, tmp_path: Path
) -> None:
    db = tmp_path / "db"
    ingest()
    before = set(DirectoryStore(db / "kv").keys())
    output = cli("repair", "--db", db, "--questions", questions, "--output", tmp_path / "r",
                 "--json")  # fmt: skip
    assert set(DirectoryStore(db / "kv").keys()) == before
    assert output.json["encoded_passages"] is None
    assert output.json["output"] == str(tmp_path / "r")
    assert output.json["report"]["questions"] == 12
    assert not (db / "recipe").exists()


def test_repairs_a_model(cli: Command, model: Path, questions: Path, tmp_path: Path) -> None:
    passages = write_jsonl(tmp_path / "passages.jsonl", PASSAGES)
    command = ("repair", "--model", model, "--passages", passages, "--questions", questions)
    output = cli(*command, "--output", tmp_path / "recipe")
    folder = tmp_path / "recipe"
    assert f'Use it: recipe="{folder}"' in output.stdout
    assert f"--recipe {folder}" in output.stdout
    assert Recipe.load(folder).prompt_format == "chat"


def test_passages_that_share_words_with_the_question_are_nearest() -> None:
    passages = [Passage("Tower", "It is high."), Passage("", "The river Teme"), Passage("Sea", "")]
    nearest = _lexical(passages)
    assert nearest("How long is the river Teme?", 1) == [passages[1]]
    assert len(nearest("the tower", 5)) == 3
