"""``ingest --store`` keeps keys and values outside of the database folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag.store import DirectoryStore
from tests.app.cli.conftest import Command


def test_store_option_is_kept(cli: Command, model: Path, documents: Path, tmp_path: Path) -> None:
    db, elsewhere = tmp_path / "db", tmp_path / "elsewhere"
    command = ("ingest", documents, "--db", db, "--model", model, "--json")
    report = cli(*command, "--store", f"file://{elsewhere}").json
    assert report["store"] == f"file://{elsewhere}"
    assert not (db / "kv").exists()
    assert DirectoryStore(elsewhere).stats().entries >= 2
    again = cli("ingest", documents, "--db", db, "--json").json
    assert (again["computed"], again["reused"]) == (0, 2)
    answer = cli("ask", "How high is Halden Tower?", "--db", db, "--json").json
    assert answer["hits"] > 0


def test_folders_are_recorded_as_absolute_paths(
    cli: Command, model: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ("ingest", documents, "--db", tmp_path / "db", "--model", model, "--json")
    assert cli(*command, "--store", "near").json["store"] == str(tmp_path / "near")


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("memory:", "is lost when this command ends"),
        ("s3:/bucket/kv", "two slashes"),
        ("ftp://host/kv", "Unknown store address ftp://"),
        ("s3://me:secret@bucket/kv", "must not contain a user, password"),
    ],
)
def test_unusable_options_are_refused(
    cli: Command, model: Path, documents: Path, tmp_path: Path, store: str, message: str
) -> None:
    output = cli("ingest", documents, "--db", tmp_path / "db", "--model", model, "--store", store)
    assert output.status != 0
    assert message in " ".join(output.stderr.replace("│", " ").split())
    assert "secret" not in output.stderr
    assert not (tmp_path / "db" / "blockattn.json").exists()
