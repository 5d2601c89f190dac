from __future__ import annotations

from pathlib import Path

import pytest

import blockattn_rag.demo.run as run
from blockattn_rag.demo.corpus import bundled_corpus, bundled_questions
from tests.cli.conftest import Command

KEYS = {"question", "answer", "expected", "correct", "sources", "hits", "misses",
        "ttft_block_s", "ttft_full_s", "finish_reason"}  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few passages and questions: the tiny model knows no answer anyway."""
    passages, questions = bundled_corpus()[:6], bundled_questions()[:2]
    monkeypatch.setattr(run, "bundled_corpus", lambda: passages)
    monkeypatch.setattr(run, "bundled_questions", lambda: questions)
    monkeypatch.setattr(run, "MAX_NEW_TOKENS", 3)


def test_a_second_demo_computes_nothing_at_ingestion_and_misses_nothing(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    command = ("demo", "--json", "--db", tmp_path / "db", "--model", model)
    first = cli(*command)
    assert first.status == 0, first.stderr
    assert first.json["ingest"]["computed"] == 6
    assert all(question.keys() >= KEYS for question in first.json["questions"])
    second = cli(*command).json
    assert (second["ingest"]["computed"], second["ingest"]["reused"]) == (0, 6)
    assert (second["ingest"]["added"], second["summary"]["misses"]) == (0, 0)
    for question in second["questions"]:
        assert question["hits"] == 6  # the instructions and five passages
        assert len(question["sources"]) == 5
        assert question["ttft_block_s"] > 0
        assert question["ttft_full_s"] > 0


def test_the_demo_shows_every_question_and_a_summary(
    cli: Command, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCKATTN_RAG_HOME", str(tmp_path / "home"))
    output = cli("demo", "--model", model, "--mode", "full")
    assert output.status == 0, output.stderr
    for turn in bundled_questions()[:2]:
        assert turn.question in output.stdout
    assert output.stdout.count(" ... [cut off by the demo's limit]") == 2
    assert "of 2 right in full mode" in output.stdout
    assert str(tmp_path / "home" / "demo") in output.stdout


def test_the_demo_keeps_its_database_in_the_user_s_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("BLOCKATTN_RAG_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run.default_folder() == tmp_path / "blockattn_rag" / "demo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert run.default_folder() == tmp_path / ".cache" / "blockattn_rag" / "demo"


@pytest.mark.parametrize("kind", ["folder", "memory", "s3"])
def test_the_demo_answers_the_same_over_every_store_and_one_string_chooses_it(
    cli: Command, model: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    addresses = {"folder": str(tmp_path / "elsewhere"), "memory": "memory:"}
    store = addresses.get(kind) or request.getfixturevalue(kind)
    command = ("demo", "--json", "--model", model, "--db")
    near = cli(*command, tmp_path / "near").json
    assert near["store"] == str(tmp_path / "near" / "kv")
    output = cli(*command, tmp_path / "far", "--store", store)
    assert output.status == 0, output.stderr
    report = output.json
    assert report["store"] == store
    assert not (tmp_path / "far" / "kv").exists()
    assert [one["answer"] for one in report["questions"]] == [
        one["answer"] for one in near["questions"]
    ]
    assert report["summary"]["misses"] == 0
    again = cli(*command, tmp_path / "far", "--store", store).json["ingest"]
    assert again["reused"] == (0 if kind == "memory" else 6)


def test_the_demo_refuses_what_is_no_store(cli: Command, model: Path, tmp_path: Path) -> None:
    command = ("demo", "--model", model, "--db", tmp_path / "db")
    for store, message in [("s3:/bucket/kv", "two slashes"), ("ftp://host/kv", "found ftp://")]:
        output = cli(*command, "--store", store)
        assert output.status != 0
        assert message in " ".join(output.stderr.replace("│", " ").split())
