from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import chromadb
import pytest
from chromadb.config import Settings

from blockattn_rag.app.rag.database import MANIFEST, chroma_client
from blockattn_rag.store import DirectoryStore
from blockattn_rag.store.urls import bytes_of
from tests.app.cli.conftest import Command
from tests.store.kvs import make_kv

NO_TELEMETRY = Settings(anonymized_telemetry=False)


@pytest.fixture
def database(database: Path, cli: Command) -> Path:
    """A database whose store contains only its passage, not the text before passages."""
    assert cli("store", "gc", database, "--grace", "0", "--json").json["deleted"]["count"] == 1
    return database


def entries(database: Path) -> list[Path]:
    return sorted((database / "kv" / "objects").rglob("*.safetensors"))


def add_orphan(database: Path) -> Path:
    """Add an entry that no passage refers to, such as the instructions before the passages."""
    kv = make_kv("instructions")
    store = DirectoryStore(database / "kv")
    store.put(kv.key, kv)
    return store.entry_path(kv.key)


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)


def test_stats_count_entries_tokens_and_bytes_by_model(cli: Command, database: Path) -> None:
    stats = cli("store", "stats", database, "--json").json
    assert stats["entries"] == len(entries(database)) == 1
    assert stats["bytes"] == sum(path.stat().st_size for path in entries(database))
    assert [model["tokens"] for model in stats["models"].values()] == [stats["tokens"]]
    # The KV folder itself is also accepted.
    assert cli("store", "stats", database / "kv", "--json").json["entries"] == 1
    assert "1" in cli("store", "stats", database).stdout


def test_stats_separate_tenants_and_types(cli: Command, database: Path) -> None:
    store = DirectoryStore(database / "kv")
    for kv in (make_kv(namespace="one"), make_kv(namespace="one", quantized=True, tokens=5)):
        kv = replace(kv, digest=f"of {kv.num_tokens} tokens")
        store.put(kv.key, kv)
    stats = cli("store", "stats", database, "--json").json
    assert {name: one["entries"] for name, one in stats["namespaces"].items()} == {"": 1, "one": 2}
    assert {name: one["entries"] for name, one in stats["kv_dtypes"].items()} == {
        "model": 2,
        "int8": 1,
    }
    assert stats["kv_dtypes"]["int8"]["tokens"] == 5
    assert stats["namespaces"]["one"]["tokens"] == 8
    shown = cli("store", "stats", database).stdout
    assert "one" in shown
    assert "int8" in shown


def test_verify_finds_damage_and_deletes_it_on_request(cli: Command, database: Path) -> None:
    cli("store", "verify", database)
    [entry] = entries(database)
    damage(entry)
    output = cli("store", "verify", database, "--json", status=1)
    assert list(output.json["damaged"]["first"]) == [entry.stem]
    cli("store", "verify", database, "--delete")
    assert not entries(database)


def test_shrink_deletes_least_recently_used(cli: Command, database: Path) -> None:
    [new] = entries(database)
    old = add_orphan(database)
    os.utime(old, (0, 0))
    most = new.stat().st_size
    done = cli("store", "shrink", database, "--max-bytes", f"{most}B", "--json").json
    assert (done["deleted"], done["left_bytes"]) == ([old.stem], most)
    assert entries(database) == [new]
    assert "Deleted 0 entries" in cli("store", "shrink", database, "--max-bytes", "1GiB").stdout


@pytest.mark.parametrize(
    ("text", "expected"),
    [("7", 7), ("1.5k", 1500), ("500MB", 500 * 10**6), ("20 GiB", 20 << 30), ("1tib", 1 << 40)],
)
def test_sizes_have_decimal_and_binary_units(text: str, expected: int) -> None:
    assert bytes_of(text) == expected


def test_gc_keeps_blocks_that_chroma_refers_to(cli: Command, database: Path) -> None:
    add_orphan(database)
    young = cli("store", "gc", database, "--json").json
    assert (young["kept"], young["kept_young"], young["deleted"]["count"]) == (1, 1, 0)
    dry = cli("store", "gc", database, "--grace", "0", "--dry-run", "--json").json
    assert dry["deleted"]["count"] == 1
    assert len(entries(database)) == 2
    done = cli("store", "gc", database, "--grace", "0s", "--json").json
    assert done["deleted"] == dry["deleted"]
    assert done["live_handles"] == 1
    assert len(entries(database)) == 1
    assert cli("ask", "How?", "--db", database, "--max-new-tokens", 1, "--json").json["hits"] == 2


def test_gc_refuses_to_delete_everything_unless_forced(cli: Command, database: Path) -> None:
    store = database / "kv"
    output = cli("store", "gc", store, "--grace", "0", status=1)
    assert "every entry would be deleted" in output.stderr
    assert len(entries(database)) == 1
    kept = cli("store", "gc", store, "--db", database / "chroma", "--grace", "0", "--json")
    assert kept.json["kept"] == 1
    assert cli("store", "gc", store, "--db", database, "--grace", "0", "--json").json["kept"] == 1
    cli("store", "gc", store, "--grace", "0", "--force")
    assert not entries(database)


def test_gc_keeps_handles_of_server(cli: Command, database: Path, chroma_server: int) -> None:
    [entry] = entries(database)
    embedded = chroma_client(database / "chroma").get_collection("passages")
    found: Any = embedded.get(include=["embeddings", "metadatas", "documents"])
    client = chromadb.HttpClient("127.0.0.1", chroma_server, settings=NO_TELEMETRY)
    name = f"served-{uuid4().hex}"
    served = client.create_collection(name, embedding_function=None)
    served.add(**{key: found[key] for key in ("ids", "embeddings", "metadatas", "documents")})
    server = ("--db", f"http://127.0.0.1:{chroma_server}")
    kept = cli("store", "gc", database / "kv", *server, "--grace", "0", "--json").json
    assert (kept["kept"], kept["deleted"]["count"]) == (1, 0)
    assert name in kept["collections"]
    served.delete(found["ids"])
    served.add("other", embeddings=found["embeddings"][0], documents="other", metadatas={"a": 1})
    output = cli("store", "gc", database / "kv", *server, "--grace", "0", status=1)
    assert "every entry would be deleted" in output.stderr
    assert entries(database) == [entry]


def test_store_may_be_folder_or_address(cli: Command, database: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    shutil.move(database / "kv", elsewhere)
    manifest = database / MANIFEST
    manifest.write_text(
        manifest.read_text().replace('"store": null', f'"store": "file://{elsewhere}"')
    )
    for name in (database, elsewhere, f"file://{elsewhere}"):
        assert cli("store", "stats", name, "--json").json["entries"] == 1
        cli("store", "verify", name)
    kept = cli("store", "gc", database, "--grace", "0", "--json").json
    assert (kept["kept"], kept["deleted"]["count"]) == (1, 0)


def test_ls_shows_each_entry_on_a_line_or_as_one_object(cli: Command, database: Path) -> None:
    [entry] = entries(database)
    orphan = add_orphan(database)
    lines = cli("store", "ls", database).stdout.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted([entry.stem, orphan.stem])
    listed = cli("store", "ls", database, "--json").json["entries"]
    assert {row["key"]: row["bytes"] for row in listed} == {
        path.stem: path.stat().st_size for path in (entry, orphan)
    }


def test_gc_collects_one_tenant_at_a_time(cli: Command, database: Path) -> None:
    store = DirectoryStore(database / "kv")
    for name in ("one", "two"):
        kv = make_kv("passage", namespace=name)
        store.put(kv.key, kv)
    done = cli("store", "gc", database, "--grace", "0", "--namespace", "one", "--json").json
    assert (done["namespaces"], done["other"], done["deleted"]["count"]) == (["one"], 2, 1)


def test_gc_by_time_to_live_needs_no_chroma(cli: Command, database: Path) -> None:
    [entry] = entries(database)
    os.utime(add_orphan(database), (0, 0))
    done = cli("store", "gc", database / "kv", "--ttl", "30d", "--json").json
    assert (done["kept"], done["deleted"]["count"]) == (1, 1)
    assert entries(database) == [entry]
    refused = cli("store", "gc", database / "kv", "--ttl", "1m", status=1)
    assert "shorter than the grace period" in refused.stderr


def test_verify_reads_the_requested_sample(cli: Command, database: Path) -> None:
    add_orphan(database)
    found = cli("store", "verify", database, "--sample", "50%", "--json").json
    assert (found["sample"], found["ok"] + found["skipped"]) == (0.5, 2)


def test_index_command_restores_the_passage_index(cli: Command, database: Path) -> None:
    written = [*(database / "kv" / "sidecar").rglob("*.safetensors")]
    assert len(written) == 1
    content = written[0].read_bytes()
    shutil.rmtree(database / "kv" / "sidecar")
    report = cli("store", "index", database, "--json").json
    assert (report["passages"], report["dropped"]) == (1, 0)
    assert written[0].read_bytes() == content
    entries(database)[0].unlink()
    assert cli("store", "index", database / "kv", "--json").json["dropped"] == 1
