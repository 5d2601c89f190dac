from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from blockattn_rag.model import BlockModel
from blockattn_rag.server.protocol import ENCODE
from tests.app.cli.conftest import Command, change_manifest
from tests.fake_server import CHATS, FakeServer
from tests.recipes import recipe_of


def test_a_database_is_ingested_and_asked_through_a_server(
    cli: Command, ingest: Command, server: FakeServer, model: Path, documents: Path, tmp_path: Path
) -> None:
    db, here = tmp_path / "db", tmp_path / "here"
    made = ingest("--server", server.url, "--json")
    expected = cli("ingest", documents, "--db", here, "--model", model, "--json").json
    same = ("passages", "computed", "computed_tokens", "stored_bytes", "fingerprint", "recipe")
    assert {name: made.json[name] for name in same} == {name: expected[name] for name in same}
    assert made.json["servers"] == [server.url]
    assert not (db / "journal").exists()
    assert not (db / "kv").exists()

    # The database saves the address of the server.
    again = cli("ingest", documents, "--db", db, "--json").json
    assert (again["computed"], again["reused"]) == (0, made.json["computed"])

    question = ("ask", "How high is Halden Tower?", "--max-new-tokens", 6, "--json")
    found, wanted = (cli(*question, "--db", folder) for folder in (db, here))
    assert found.json["answer"] == wanted.json["answer"]
    # The server keeps the instructions before the passages in memory and does not store them.
    assert (found.json["misses"], wanted.json["misses"]) == (1, 0)
    assert len(server.bodies(CHATS)) == 1
    assert "the-secret" not in made.stdout + made.stderr + (db / "blockattn.json").read_text()


def test_several_servers_share_an_ingestion_and_a_stopped_one_is_skipped(
    cli: Command, ingest: Command, server: FakeServer, loaded: BlockModel, tmp_path: Path
) -> None:
    with FakeServer(loaded, server.engine.store, api_key="the-secret").listening() as second:
        urls = ["http://127.0.0.1:9", server.url, second.url]
        made = ingest(*(word for url in urls for word in ("--server", url)), "--json").json
        assert made["servers"] == urls
        assert made["computed"] > 0
        cli("ask", "How high?", "--db", tmp_path / "db", "--max-new-tokens", 2)


def test_an_interrupted_ingestion_is_resumed_from_its_journal(
    ingest: Command, server: FakeServer, tmp_path: Path
) -> None:
    journal, command = tmp_path / "db" / "journal", ("--server", server.url, "--json")
    full = OSError("The disk is full")
    with patch("blockattn_rag.app.rag.ingest.synchronize", side_effect=full):
        ingest(*command, status=1)
    assert [*journal.iterdir()]
    sent = len(server.bodies(ENCODE))
    resumed = ingest(*command).json
    assert (resumed["computed"], resumed["added"]) == (0, resumed["passages"])
    assert len(server.bodies(ENCODE)) == sent, "expected no look-up of recorded passages"
    assert not journal.exists()
    assert ingest(*command).json["reused"] == resumed["reused"]
    assert len(server.bodies(ENCODE)) > sent, "expected a complete ingestion to be looked up again"


def test_a_recipe_that_differs_from_the_servers_is_refused(
    cli: Command, ingest: Command, server: FakeServer, loaded: BlockModel, documents: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    db, recipe = tmp_path / "db", tmp_path / "recipe"
    ingest("--recipe", "head:4")
    cli("ingest", documents, "--db", db, "--server", server.url)
    recipe_of(loaded).save(recipe)
    asking = ("ask", "How high?", "--db", db, "--max-new-tokens", 2)
    cli(*asking)  # with the recipe of the server
    output = cli(*asking, "--recipe", recipe, status=1)
    assert "already has one, none; remove the recipe" in " ".join(output.stderr.split())
    output = cli(*asking, "--recipe", "bos", status=1)
    assert "Cannot use the recipe 'bos'" in output.stderr


def test_repair_needs_a_local_model(cli: Command, database: Path, server: FakeServer) -> None:
    change_manifest(database, servers=[server.url])
    output = cli("repair", "--db", database, status=1)
    assert "requires a model in this process: pass --model" in output.stderr
