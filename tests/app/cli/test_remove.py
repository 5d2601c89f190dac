from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.cli.conftest import Command


@pytest.fixture
def database(ingest: Command, tmp_path: Path) -> Path:
    """A database of two documents whose files still exist."""
    ingest()
    return tmp_path / "db"


def test_removed_file_is_collected(cli: Command, database: Path, documents: Path) -> None:
    report = cli("remove", documents / "tower.txt", "--db", database, "--json").json
    assert report["removed"] == 1
    assert report["sources"] == [str(documents / "tower.txt")]
    freed = cli("store", "gc", database, "--grace", "0s", "--json").json
    # The passage, and the text before passages, which Chroma does not refer to.
    assert freed["deleted"]["count"] == 2
    command = ("ask", "How high is Halden Tower?", "--db", database, "--max-new-tokens", 2)
    found = cli(*command, "--json").json
    assert all("Halden" not in source["text"] for source in found["sources"])


def test_deleted_file_is_removed_by_path(cli: Command, database: Path, documents: Path) -> None:
    gone = documents / "tower.txt"
    gone.unlink()
    output = cli("ingest", documents, "--db", database)
    assert f"{database} still has their passages: {gone}" in output.stderr
    assert cli("ingest", documents, "--db", database, "--json").json["orphaned"] == [str(gone)]
    assert cli("remove", gone, "--db", database, "--json").json["removed"] == 1
    assert cli("ingest", documents, "--db", database, "--json").json["orphaned"] == []


def test_folder_removes_its_files(cli: Command, database: Path, documents: Path) -> None:
    assert cli("remove", documents, "--db", database, "--json").json["removed"] == 2
    output = cli("ask", "How?", "--db", database, status=1)
    assert "contains no passages" in output.stderr


def test_files_that_were_not_ingested_are_refused(
    cli: Command, database: Path, documents: Path, tmp_path: Path
) -> None:
    tower, other = documents / "tower.txt", tmp_path / "other.txt"
    output = cli("remove", tower, other, "--db", database, status=1)
    assert f"has no passages from {other}" in output.stderr
    assert cli("remove", tower, "--db", database, "--json").json["removed"] == 1


def test_link_is_removed_by_name(cli: Command, database: Path, documents: Path) -> None:
    link = documents / "link.txt"
    link.symlink_to(documents / "tower.txt")
    cli("ingest", documents, "--db", database)
    assert cli("remove", link, "--db", database, "--json").json["sources"] == [str(link)]


def test_a_file_replaced_by_a_link_to_the_outside_is_reported(
    cli: Command, database: Path, documents: Path, tmp_path: Path
) -> None:
    replaced, outside = documents / "tower.txt", tmp_path / "outside.txt"
    replaced.rename(outside)
    replaced.symlink_to(outside)
    output = cli("ingest", documents, "--db", database)
    assert f"Skipped: 1 link pointing outside the folder, for example {replaced};" in output.stderr
    assert f"{database} still has their passages: {replaced}" in output.stderr


def test_the_suggested_command_deletes_the_unused_kv(
    cli: Command, database: Path, documents: Path
) -> None:
    suggestion = cli("remove", documents, "--db", database).stdout.split("blockattn-rag ")[1]
    words = suggestion.replace("\n", "").split()
    assert cli(*words, "--json").json["deleted"]["count"] == 3  # with the text before passages
