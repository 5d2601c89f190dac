"""The page of ``demo --web``, without a browser."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest
from llama_index.core.schema import Document

from blockattn_rag.app.demo.web import Columns, Race, serve
from blockattn_rag.app.rag.database import Database, Manifest
from blockattn_rag.app.rag.documents import set_source
from blockattn_rag.app.rag.ingest import ingest_documents
from tests.models import tiny_model, tiny_tokenizer

HOSTILE = "Halden Tower <img src=x onerror=alert(1)> ${alert(2)} {{3}} stands in Mirtan."


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Database:
    folder = tmp_path_factory.mktemp("web")
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    database = Database.create(folder / "db", Manifest(str(folder / "model"), fingerprint=""))
    texts = [HOSTILE, "Elven Tower is 187 metres tall."]
    documents = [Document(text=text, metadata={"title": str(i)}) for i, text in enumerate(texts)]
    for document in documents:
        set_source(document, "test")
    ingest_documents(database, documents)
    return database


def shown(race: Race, question: str) -> list[Columns]:
    return list(race.run(question))


def test_both_modes_answer_and_the_last_columns_compare_them(database: Database) -> None:
    first, *_, last = shown(Race(database, top_k=2), "In which city does Halden Tower stand?")
    assert "ba-bar" not in first.full + first.block
    assert "Full mode" in last.full
    assert "prompt tokens: 0 reused" in last.full
    assert "Block mode" in last.block
    assert "prompt tokens: 0 reused" not in last.block
    assert re.search(r"First token [\d.]+ times (sooner|later) in block mode", last.passages)


def test_block_mode_answers_before_full_mode_starts(database: Database) -> None:
    columns = shown(Race(database, top_k=2), "Which tower is taller?")
    answered = next(i for i, one in enumerate(columns) if "ba-bar" in one.block)
    assert "waiting" not in "".join(one.full for one in columns[: answered + 1])


def test_passages_are_marked_by_whether_they_were_stored_before(database: Database) -> None:
    store = database.local_engine.store
    for key in list(store.keys()):
        store.delete(key)
    race = Race(Database.open(database.path), top_k=2)  # no block of which is in memory
    first, *_, last = shown(race, "Halden Tower")
    assert first.passages.count("computed now") == last.passages.count("computed now") == 2
    first, *_ = shown(race, "Halden Tower")
    assert first.passages.count("computed now") == 0


def test_texts_of_others_are_escaped(database: Database) -> None:
    last = shown(Race(database, top_k=2), "Halden Tower")[-1]
    assert "<img" not in "".join(last)
    assert "&lt;img src=x onerror=alert(1)&gt;" in last.passages


def test_an_error_is_shown_and_escaped(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    race = Race(database, top_k=2)

    def broken(question: str) -> list[object]:
        raise ValueError("no <b>question</b>")

    monkeypatch.setattr(race, "retrieved", broken)
    (columns,) = shown(race, "Halden Tower")
    assert "Error:</b> no &lt;b&gt;question" in columns.passages


def test_an_empty_question_is_not_asked(database: Database) -> None:
    (columns,) = shown(Race(database), "  ")
    assert columns.passages == "Type a question."


def test_a_closed_page_ends_the_answer(database: Database) -> None:
    coming: Iterator[Columns] = Race(database, top_k=2).run("Halden Tower")
    next(coming)
    next(coming)
    coming.close()  # type: ignore[attr-defined]
    assert not [one for one in threading.enumerate() if one.name.startswith("ThreadPoolExecutor")]


def test_the_page_is_served_on_the_loopback_address(database: Database) -> None:
    import gradio
    import httpx

    found: dict[str, object] = {}

    def ready(url: str) -> None:
        found["url"] = url
        found["page"] = httpx.get(url).text
        gradio.close_all()

    serve(Race(database, top_k=2), ["Which tower is taller?"], ready)
    assert str(found["url"]).startswith("http://127.0.0.1:")
    assert "blockattn-rag" in str(found["page"])
