from __future__ import annotations

import logging
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.app.rag.ask import Assistant, Turn, with_history
from blockattn_rag.app.rag.database import Database, Manifest
from blockattn_rag.app.rag.documents import load_documents
from blockattn_rag.app.rag.ingest import ingest_documents
from blockattn_rag.app.rag.passages import retriever
from tests.holding import FEW, holding
from tests.recording import recorded


@pytest.fixture
def database(model: Path, documents: Path, tmp_path: Path) -> Database:
    """A database with ``documents``."""
    database = Database.create(tmp_path / "db", Manifest(str(model)))
    ingest_documents(database, load_documents([documents]).documents)
    return database


def test_a_store_that_fails_after_ingestion_only_causes_a_warning(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    folder, question = database.path, "How high is Halden Tower?"
    expected = Assistant(Database.open(folder), max_new_tokens=4).ask(question)

    assistant = Assistant(Database.open(folder), max_new_tokens=4)
    shutil.rmtree(folder / "kv")
    (folder / "kv").write_text("in the way")
    with caplog.at_level(logging.WARNING, "blockattn_rag.app.rag"):
        answer = assistant.ask(question)
    assert answer.answer == expected.answer
    assert (answer.stats.hits, expected.stats.misses) == (0, 0)
    warnings = [one.getMessage() for one in caplog.records if one.name == "blockattn_rag.app.rag"]
    assert len(warnings) == 1
    assert warnings[0].endswith("The answer is not affected.")
    assert str(folder / "kv") in warnings[0]
    assistant.ask(question)
    assert len([one for one in caplog.records if one.name == "blockattn_rag.app.rag"]) == 1


def test_question_must_be_valid_text(database: Database) -> None:
    assistant = Assistant(database, max_new_tokens=2, top_k=1)
    with pytest.raises(ValueError, match="Invalid UTF-8 after 2 characters of the question"):
        assistant.ask("a \udcff?")


def test_earlier_turns_follow_the_passages_which_remain_hits(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recorded(monkeypatch, BlockAttentionEngine, "stream")
    assistant = Assistant(database, max_new_tokens=2, top_k=1)
    first = assistant.ask("How high is Halden Tower?")
    turns = [Turn("How high is Halden Tower?", "214 metres.")]
    second = assistant.ask("Why?", history=turns)
    assert second.question == "Why?"
    assert [source.text for source in second.sources] == [source.text for source in first.sources]
    [found], [alone] = second.sources, assistant.ask("Why?").sources
    assert (found.score or 0) > (alone.score or 0)  # the query contains the previous question
    assert second.stats.misses == 0
    before, after, _ = (call.args[1] for call in asked)
    assert after.context == before.context
    assert "A: 214 metres.\n\nThis question: Why?" in after.final
    assert 0 < second.stats.ttft_s <= second.waited_s


def test_stopped_answer_frees_the_model(database: Database) -> None:
    assistant = Assistant(database, max_new_tokens=2000)
    stop = Mock(side_effect=KeyboardInterrupt)
    with holding() as held:
        held.let_go(FEW)
        with pytest.raises(KeyboardInterrupt):
            assistant.ask("How high is Halden Tower?", on_text=stop)
        held.wait_for_end()
    assert held.tokens <= FEW + 1


def test_passages_with_equal_texts_count_once(database: Database, documents: Path) -> None:
    for copy in range(4):
        (documents / f"copy{copy}").mkdir()
        (documents / f"copy{copy}" / "tower.txt").write_text("Halden Tower is 214 metres high.\n")
    ingest_documents(database, load_documents([documents]).documents)
    assistant = Assistant(database, max_new_tokens=2, top_k=2)
    texts = [source.text for source in assistant.ask("How high is Halden Tower?").sources]
    assert texts[0] == "Halden Tower is 214 metres high."
    assert len(set(texts)) == len(texts) == 2
    assert len(retriever(database)("How high is Halden Tower?", 2)) == 2


def test_answer_json_has_the_recipe(database: Database) -> None:
    assistant = Assistant(database, max_new_tokens=2)
    assert assistant.ask("How high?").to_dict()["recipe"] == str(database.engine.recipe) != ""
    assert assistant.ask("How high?", mode="full").to_dict()["recipe"] == ""


TURNS = [Turn("How high?", "214 metres."), Turn("And how old?", "95 years.")]


def test_a_question_without_history_is_unchanged() -> None:
    assert with_history("Why?", [], count=len, max_tokens=100) == "Why?"


def test_earlier_turns_precede_the_question_oldest_first() -> None:
    assert with_history("Why?", TURNS, count=len, max_tokens=100) == (
        "Earlier questions and answers:\nQ: How high?\nA: 214 metres.\nQ: And how old?\n"
        "A: 95 years.\n\nThis question: Why?"
    )


def test_the_oldest_turns_that_do_not_fit_are_dropped() -> None:
    newest = len("Q: And how old?\nA: 95 years.")
    assert "How high?" not in with_history("Why?", TURNS, count=len, max_tokens=newest)
    assert "And how old?" in with_history("Why?", TURNS, count=len, max_tokens=newest)
    assert with_history("Why?", TURNS, count=len, max_tokens=newest - 1) == "Why?"
