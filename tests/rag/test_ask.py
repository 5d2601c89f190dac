"""Questions to a database: what answers them, and what does not keep them from being answered."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from blockattn_rag.rag.ask import Assistant
from blockattn_rag.rag.database import Database, Manifest
from blockattn_rag.rag.documents import load_documents
from blockattn_rag.rag.ingest import ingest_documents


def test_a_store_that_fails_after_ingestion_costs_a_warning_and_never_an_answer(
    model: Path, documents: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "db"
    database = Database.create(folder, Manifest(str(model), fingerprint=""))
    ingest_documents(database, load_documents([documents], exclude=folder).documents)
    question = "How high is Halden Tower?"
    expected = Assistant(Database.open(folder), max_new_tokens=4).ask(question)

    assistant = Assistant(Database.open(folder), max_new_tokens=4)
    shutil.rmtree(folder / "kv")
    (folder / "kv").write_text("in the way")
    with caplog.at_level(logging.WARNING, "blockattn_rag.rag"):
        answer = assistant.ask(question)
    assert answer.answer == expected.answer
    assert (answer.stats.hits, expected.stats.misses) == (0, 0)
    told = [one.getMessage() for one in caplog.records if one.name == "blockattn_rag.rag"]
    assert len(told) == 1
    assert told[0].endswith("The answer is not affected.")
    assert str(folder / "kv") in told[0]
    assistant.ask(question)
    assert len([one for one in caplog.records if one.name == "blockattn_rag.rag"]) == 1
