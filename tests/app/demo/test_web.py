"""The web page of ``demo --web``, tested without a browser."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from gradio_client import Client
from llama_index.core.schema import Document

from blockattn_rag.app.demo.web import Columns, Race, serve_page
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
    database = Database.create(folder / "db", Manifest(str(folder / "model")))
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
    store = database.engine.store
    for key in list(store.keys()):
        store.delete(key)
    race = Race(Database.open(database.path), top_k=2)  # with no block in memory
    first, *_, last = shown(race, "Halden Tower")
    assert first.passages.count("computed now") == last.passages.count("computed now") == 2
    first, *_ = shown(race, "Halden Tower")
    assert first.passages.count("computed now") == 0


def test_untrusted_texts_are_escaped(database: Database) -> None:
    last = shown(Race(database, top_k=2), "Halden Tower")[-1]
    assert "<img" not in "".join(last)
    assert "&lt;img src=x onerror=alert(1)&gt;" in last.passages


def test_an_error_is_shown_and_escaped(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    race, broken = Race(database, top_k=2), Mock(side_effect=ValueError("no <b>question</b>"))
    monkeypatch.setattr(race.assistant, "ask", broken)
    assert "Error:</b> no &lt;b&gt;question" in shown(race, "Halden Tower")[-1].passages


def test_an_empty_question_is_not_asked(database: Database) -> None:
    (columns,) = shown(Race(database), "  ")
    assert columns.passages == "Type a question."


def test_a_closed_page_ends_the_answer(database: Database) -> None:
    coming: Iterator[Columns] = Race(database, top_k=2).run("Halden Tower")
    next(coming)
    next(coming)
    coming.close()  # type: ignore[attr-defined]
    assert not [one for one in threading.enumerate() if one.name.startswith("ThreadPoolExecutor")]


Checks = Callable[[str], None]
Serve = Callable[[Checks], None]


@pytest.fixture
def served(database: Database) -> Serve:
    """Serve the page while ``checks`` runs with its address."""
    import gradio

    def run(checks: Checks) -> None:
        def ready(url: str) -> None:
            try:
                checks(url)
            finally:
                gradio.close_all()

        serve_page(Race(database, top_k=2), ["Which tower is taller?"], ready)

    return run


def test_the_page_is_served_on_the_loopback_address(served: Serve) -> None:
    def checks(url: str) -> None:
        assert url.startswith("http://127.0.0.1:")
        assert "blockattn-rag" in httpx.get(url).text
        assert httpx.get(url, headers={"host": "LOCALHOST:80"}).is_success
        client = Client(url, verbose=False, analytics_enabled=False)
        assert "First token" in client.predict("Halden Tower", api_name="/run")[-1]

    served(checks)


def test_other_host_names_are_refused(served: Serve) -> None:
    def checks(url: str) -> None:
        for host in ("evil.example", "evil.example:7860", "127.0.0.1.evil.example", "[::1]", ""):
            headers = {"host": host, "origin": f"http://{host}"}
            for response in (
                httpx.get(url, headers=headers),
                httpx.get(f"{url}config", headers=headers),
                httpx.post(f"{url}gradio_api/call/run", json={"data": ["Who?"]}, headers=headers),
                httpx.options(url, headers={**headers, "access-control-request-method": "POST"}),
            ):
                assert response.status_code == 400, response.text
                assert "access-control" not in str(response.headers)

    served(checks)


@pytest.mark.parametrize(
    ("name", "host"), [("demo.example", "demo.example"), ("::1", "[::1]"), ("[::1]", "[::1]")]
)
def test_the_configured_server_name_is_trusted(
    served: Serve, monkeypatch: pytest.MonkeyPatch, name: str, host: str
) -> None:
    def checks(url: str) -> None:
        assert httpx.get(url, headers={"host": f"{host}:7860"}).is_success
        assert httpx.get(url, headers={"host": "evil.example"}).status_code == 400

    monkeypatch.setenv("GRADIO_SERVER_NAME", name)  # too late for gradio: it listens on 127.0.0.1
    served(checks)


def test_other_origins_cannot_read_answers(served: Serve) -> None:
    def checks(url: str) -> None:
        response = httpx.get(url, headers={"origin": "http://evil.example"})
        assert "access-control-allow-origin" not in response.headers

    served(checks)


def test_uploads_are_refused(
    served: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))

    def checks(url: str) -> None:
        for route in ("upload", "process_recording", "component_server"):
            files = {"files": ("big.bin", b"x" * 100_000)}
            response = httpx.post(f"{url}gradio_api/{route}", files=files)
            assert response.status_code == 415, response.text
        for kind in ({}, {"content-type": "text/plain"}):
            response = httpx.post(f"{url}gradio_api/upload", content=b"x", headers=kind)
            assert response.status_code == 415, response.text

    served(checks)
    assert not [*tmp_path.rglob("*.bin")]
