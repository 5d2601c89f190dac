from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.app.cli.output import size
from blockattn_rag.app.rag.database import MANIFEST, Database, Manifest
from blockattn_rag.app.rag.documents import load_documents
from blockattn_rag.app.rag.ingest import Estimate, ingest_documents
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.model import BlockModel
from tests.app.cli.conftest import Command
from tests.app.rag.test_documents import forbid, two_pages
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of


def test_second_ingest_is_empty(cli: Command, model: Path, documents: Path, tmp_path: Path) -> None:
    db = tmp_path / "db"
    first = cli("ingest", documents, "--db", db, "--model", model, "--json").json
    assert (first["documents"], first["passages"], first["added"]) == (2, 2, 2)
    assert (first["computed"], first["reused"]) == (2, 0)
    assert first["computed_tokens"] > 0
    assert first["tokens_per_s"] > 0
    assert first["stored_bytes"] > 0
    assert [Path(s["file"]).name for s in first["skipped"]] == ["picture.raw"]
    again = cli("ingest", documents, "--db", db, "--json").json
    assert (again["added"], again["removed"], again["computed"], again["reused"]) == (0, 0, 0, 2)
    assert again["stored_bytes"] == 0


def test_the_next_ingestion_completes_one_interrupted_before_chroma(
    cli: Command, model: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    command = ("ingest", documents, "--db", tmp_path / "db", "--model", model, "--json")
    with monkeypatch.context() as patch:
        patch.setattr("blockattn_rag.app.rag.ingest.synchronize", stop)
        assert cli(*command).status == 130
    report = cli(*command).json
    assert (report["computed"], report["reused"], report["added"]) == (0, 2, 2)


def test_files_that_cannot_be_opened_are_skipped(
    cli: Command, model: Path, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("ingest", documents, "--db", tmp_path / "db", "--model", model)
    assert cli(*command).status == 0
    (documents / "more" / "lake.txt").write_text("The Ossa Lake is deep.", encoding="utf-8")
    with monkeypatch.context() as patch:
        forbid(patch, documents / "tower.txt")
        output = cli(*command, "--json")
        shown = cli(*command)
    assert output.status == shown.status == 3
    report, file = output.json, str(documents / "tower.txt")
    assert report["inaccessible"] == [
        {"path": file, "reason": "cannot be opened (Permission denied)"}
    ]
    assert (report["documents"], report["added"], report["orphaned"]) == (2, 1, [])
    assert f"Skipped: {file}: cannot be opened (Permission denied)" in shown.stderr
    assert f"error: Could not open 1 file or folder: {file}; everything else" in shown.stderr
    assert cli(*command, "--json").json["inaccessible"] == []


def test_replaces_changed_files(cli: Command, model: Path, documents: Path, tmp_path: Path) -> None:
    db = tmp_path / "db"
    cli("ingest", documents, "--db", db, "--model", model)
    (documents / "tower.txt").write_text("Halden Tower is 300 metres high.", encoding="utf-8")
    report = cli("ingest", documents, "--db", db, "--json").json
    assert (report["added"], report["removed"], report["computed"]) == (1, 1, 1)
    answer = cli("ask", "How high is Halden Tower?", "--db", db, "--max-new-tokens", 2, "--json")
    assert answer.json["sources"][0]["text"] == "Halden Tower is 300 metres high."
    assert len(answer.json["sources"]) == 2


def test_settings_of_a_database_are_saved_and_used_by_ask(
    cli: Command, model: Path, documents: Path, tmp_path: Path
) -> None:
    settings = {"recipe": "head:3", "namespace": "one", "kv_dtype": "int8"}
    options = ("--recipe", "head:3", "--namespace", "one", "--kv-dtype", "int8")
    command = ("ingest", documents, "--db", tmp_path / "db", "--json")
    first = cli(*command, "--model", model, *options).json
    again = cli(*command).json
    assert (first["computed"], first["reused"]) == (2, 0)
    assert (again["computed"], again["reused"]) == (0, 2)
    assert [{name: report[name] for name in settings} for report in (first, again)] == [
        settings
    ] * 2
    ask = ("ask", "How high is Halden Tower?", "--db", tmp_path / "db", "--max-new-tokens", 2)
    answer = cli(*ask, "--json").json
    assert (answer["hits"], answer["misses"], answer["int8_blocks"]) == (3, 0, 3)
    assert "(3 in int8);" in " ".join(cli(*ask).stdout.split())


@pytest.mark.parametrize(
    ("option", "value"), [("--recipe", "nowhere"), ("--namespace", "t/wo"), ("--kv-dtype", "int4")]
)
def test_invalid_settings_are_refused(
    cli: Command, database: Path, documents: Path, option: str, value: str
) -> None:
    assert cli("ingest", documents, "--db", database, option, value).status != 0


def test_ingest_changes_saved_settings_only_on_request(
    cli: Command, database: Path, documents: Path
) -> None:
    path = database / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stock": "head:2"}))
    command = ("ingest", documents, "--db", database)
    found = [cli(*command, *more).stdout for more in ((), ("--recipe", "auto"))]
    assert "recipe of block mode: head:2" in found[0]
    assert "recipe of block mode: head+recompute:0.1" in found[1]
    assert json.loads(path.read_text())["stock"] == "head+recompute:0.1"


def test_finds_recipe_of_database(cli: Command, database: Path, model: Path) -> None:
    command = ("ask", "How high is it?", "--db", database, "--max-new-tokens", 3, "--json")
    plain = cli(*command).json
    loaded = BlockModel.from_pretrained(model)
    recipe_of(loaded, sink="head:4").save(database / "recipe")
    found = [cli(*command).json for _ in range(2)]
    assert (plain["misses"], found[0]["misses"], found[1]["misses"]) == (0, 1, 0)


def test_keeps_kv_dtype(cli: Command, model: Path, documents: Path, tmp_path: Path) -> None:
    db = tmp_path / "db"
    command = ("ingest", documents, "--db", db, "--model", model, "--json", "--kv-dtype")
    assert cli(*command, "int8").json["computed"] == 2
    again = cli(*command, "model").json
    assert (again["reused"], again["kv_dtype"]) == (2, "model")
    answer = cli("ask", "How high is it?", "--db", db, "--max-new-tokens", 2, "--json")
    assert answer.json["int8_blocks"] == 3


def test_splits_long_documents(cli: Command, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("One more sentence of text. " * 40, encoding="utf-8")
    command = ("ingest", text, "--db", tmp_path / "db", "--model", model, "--json")
    report = cli(*command, "--chunk-size", 200).json
    assert report["passages"] >= 6
    # The sentences repeat, and equal passages share one block.
    assert report["computed"] + report["reused"] <= report["passages"]
    assert cli(*command).json["passages"] == report["passages"]  # the chunk size was saved


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ((), 2, "--model"),
        (("--model", "no/such-model"), 1, "error: Cannot load no/such-model: "),
        (
            ("--model", "{model}", "--embedding", "./nowhere"),
            1,
            "No such embedding: ./nowhere; expected the folder of a",
        ),
        (
            ("--model", "{model}", "--embedding", "BAAI/bge-small-en-v1.5"),
            1,
            "pip install llama-index-embeddings-huggingface",
        ),
    ],
)
def test_a_new_database_needs_a_usable_model_and_embedding(
    cli: Command,
    documents: Path,
    model: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    status: int,
    message: str,
) -> None:
    command = ("ingest", documents, "--db", tmp_path / "db")
    output = cli(*command, *(option.format(model=model) for option in options))
    assert (output.status, message in output.stderr) == (status, True), output.stderr
    assert not (tmp_path / "db" / MANIFEST).exists()


def test_another_embedding_is_refused(cli: Command, database: Path, documents: Path) -> None:
    output = cli("ingest", documents, "--db", database, "--embedding", "BAAI/bge-small-en-v1.5")
    assert (output.status, "made with embedding 'hashing'" in output.stderr) == (1, True)


def test_an_answer_lists_its_sources_and_reuse(cli: Command, database: Path) -> None:
    output = cli("ask", "How high is Halden Tower?", "--db", database, "--max-new-tokens", 3)
    assert output.status == 0, output.stderr
    *_, source, reuse = output.stdout.splitlines()
    assert source.startswith("[1] ")
    assert "Halden Tower is 214 metres high." in source
    assert reuse.startswith("block mode: 2 blocks reused, 0 computed;")
    assert "first token after" in reuse
    assert "int8" not in reuse


def test_first_answer_reuses_every_block(cli: Command, database: Path) -> None:
    command = ("ask", "How high is it?", "--db", database, "--max-new-tokens", 3, "--json")
    first, second = cli(*command).json, cli(*command).json
    assert (first["hits"], first["misses"]) == (2, 0)
    assert (second["hits"], second["misses"]) == (2, 0)
    assert second["answer"] == first["answer"]
    assert second["ttft_s"] > 0
    assert set(second["sources"][0]) == {"source", "page", "title", "text", "score"}


def test_the_first_answer_is_reported_as_including_the_warm_up(
    cli: Command, database: Path
) -> None:
    command = ("ask", "--db", database, "--max-new-tokens", 3)
    asked = "How high is it?\nHow long is it?\n"
    answers = cli(*command, "--json", given=asked).stdout.splitlines()
    assert [json.loads(line)["includes_warm_up"] for line in answers] == [True, False]
    shown = cli(*command, given=asked).stdout
    assert shown.count("(with the one-time warm-up)") == 1


def test_full_mode_reuses_nothing(cli: Command, database: Path) -> None:
    command = ("ask", "How high is it?", "--db", database, "--max-new-tokens", 3, "--json")
    answer = cli(*command, "--mode", "full").json
    assert (answer["mode"], answer["hits"], answer["reused_tokens"]) == ("full", 0, 0)
    assert cli(*command, "--mode", "fast").status == 2
    shown = cli(*command[:-1], "--mode", "full").stdout
    assert "full mode: nothing reused, " in shown


def test_ask_takes_a_recipe(cli: Command, database: Path, model: Path, tmp_path: Path) -> None:
    command = ("ask", "How high is it?", "--db", database, "--max-new-tokens", 3)
    recipe_of(BlockModel.from_pretrained(model), sink="bos", promote=1).save(tmp_path / "recipe")
    chosen = (*command, "--recipe", tmp_path / "recipe")
    answer = cli(*chosen, "--json").json
    plain = cli(*command, "--json").json
    assert answer["hits"] + answer["misses"] == plain["hits"] + plain["misses"] - 1
    assert "promote:1" in cli(*chosen).stdout
    other = tmp_path / "other"
    tiny_model(seed=1).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    refused = cli(*chosen, "--model", other)
    assert refused.status == 1
    assert "belongs to" in refused.stderr
    nowhere = cli(*command, "--recipe", "nowhere")
    assert (nowhere.status, "Found no recipe at nowhere" in nowhere.stderr) == (1, True)


def test_asking_with_another_model_logs_a_warning(
    cli: Command, database: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    tiny_model(seed=1).save_pretrained(other)
    tiny_tokenizer().save_pretrained(other)
    command = ("ask", "How?", "--db", database, "--max-new-tokens", 2, "--json", "--model", other)
    output = cli(*command)
    assert output.json["misses"] == 1
    assert "passages will be encoded again on first use" in output.stderr
    assert cli(*command).json["misses"] == 0


def test_ingesting_with_another_model_is_refused(
    cli: Command, database: Path, documents: Path, model: Path
) -> None:
    output = cli("ingest", documents, "--db", database, "--model", "bundled")
    assert output.status == 1
    assert output.stderr.startswith(f"error: {database} has passages encoded by {model}, found ")
    assert "remove --model, or ingest into a new folder" in output.stderr
    assert cli("ingest", documents, "--db", database, "--model", model).status == 0


def test_a_moved_model_is_found_again(
    cli: Command, documents: Path, model: Path, tmp_path: Path
) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    shutil.copytree(model, before)
    command = ("ingest", documents, "--db", tmp_path / "db", "--json", "--model")
    assert cli(*command, before).json["computed"] == 2
    before.rename(after)
    output = cli(*command, after)
    assert (output.json["computed"], output.json["model"]) == (0, str(after))
    assert output.stderr.count(f"was made with {before} and now uses {after}") == 1


def test_a_failed_ingestion_saves_neither_model_nor_embedding(
    cli: Command, documents: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    db = tmp_path / "db"
    failed = cli("ingest", documents, "--db", db, "--model", model, "--embedding", "no/such-one")
    assert (failed.status, (db / MANIFEST).exists()) == (1, False)
    with monkeypatch.context() as patch:
        patch.setattr("blockattn_rag.app.rag.ingest.synchronize", stop)
        assert cli("ingest", documents, "--db", db, "--model", "bundled").status == 130
    manifest = json.loads((db / MANIFEST).read_text(encoding="utf-8"))
    (db / MANIFEST).write_text(json.dumps(manifest | {"embedding": "no/such-one"}))
    report = cli(
        "ingest", documents, "--db", db, "--model", model, "--embedding", "hashing", "--json"
    )
    assert (report.json["added"], report.json["embedding"]) == (2, "hashing")


def test_ingest_prints_an_estimate_of_the_work(
    cli: Command, documents: Path, model: Path, tmp_path: Path
) -> None:
    command = ("ingest", documents, "--db", tmp_path / "db", "--model", model)
    output = cli(*command, "--json")
    [line] = [line for line in output.stderr.splitlines() if " to encode: about " in line]
    assert line.startswith(f"2 passages of {output.json['computed_tokens']} tokens to encode: ")
    assert f" of keys and values in {tmp_path / 'db' / 'kv'}, " in line
    assert " free, about " in line
    text = "Halden Tower is 214 metres high." + "# Rivers\n\nThe Ossa River is long."
    [rate] = re.findall(r"1 MB of such text takes about ([\d.]+ \w+) with", output.stderr)
    assert rate == size(output.json["stored_bytes"] / len(text) * 1e6)
    assert " to encode: " not in cli(*command).stderr  # everything is stored


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_the_estimate_of_the_size_is_exact(
    kv_dtype: Any, documents: Path, model: Path, tmp_path: Path
) -> None:
    estimates: list[Estimate] = []
    wanted = Manifest(str(model), kv_dtype=kv_dtype)
    database = Database.create(tmp_path / "db", wanted)
    loaded = load_documents([documents])
    report = ingest_documents(database, loaded.documents, on_estimate=estimates.append)
    [found] = estimates
    assert found.new_blocks == 2
    assert (found.new_tokens, found.new_bytes) == (report.computed_tokens, report.stored_bytes)


def test_an_ingestion_that_exceeds_the_free_disk_space_is_refused(
    cli: Command, documents: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("blockattn_rag.app.rag.ingest.shutil.disk_usage", lambda _: usage)
    output = cli("ingest", documents, "--db", tmp_path / "db", "--model", model)
    assert output.status == 1
    assert "free, but the keys and values of 2 passages take about " in output.stderr
    assert "--kv-dtype int8" in output.stderr
    assert not [*(tmp_path / "db").rglob("*.safetensors")]


def test_int8_is_suggested_for_large_databases(
    cli: Command, documents: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("ingest", documents, "--model", model, "--db")
    assert "--kv-dtype int8" not in cli(*command, tmp_path / "small").stderr
    monkeypatch.setattr("blockattn_rag.app.cli.ingest.LARGE_BYTES", 1)
    assert "note: with --kv-dtype int8 they would" in cli(*command, tmp_path / "large").stderr


def test_equal_texts_are_reported(
    cli: Command, documents: Path, model: Path, tmp_path: Path
) -> None:
    shutil.copy(documents / "tower.txt", documents / "copy.txt")
    output = cli("ingest", documents, "--db", tmp_path / "db", "--model", model)
    assert "stored; 1 passage of equal text share them" in output.stdout


def test_an_empty_question_is_refused(
    cli: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli("ask", " ", "--db", database).status == 2
    manifest = json.loads((database / MANIFEST).read_text(encoding="utf-8"))
    manifest["collection"] = "empty"
    (database / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    output = cli("ask", "How?", "--db", database)
    assert output.status == 1
    assert "contains no passages" in output.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is damaged"),
        ('{"version": 9}', "has version 9, expected 2"),
        ('{"version": 2}', "damaged"),
    ],
)
def test_refuses_unusable_manifests(cli: Command, database: Path, text: str, message: str) -> None:
    (database / MANIFEST).write_text(text, encoding="utf-8")
    output = cli("ask", "How?", "--db", database)
    assert output.status == 1
    assert message in output.stderr


def test_square_brackets_in_a_passage_are_not_markup(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "brackets.txt"
    text.write_text("[/bold] The depth is 45 feet. [link=x] [red]", encoding="utf-8")
    assert cli("ingest", text, "--db", tmp_path / "db", "--model", model).status == 0
    output = cli("ask", "How deep?", "--db", tmp_path / "db", "--max-new-tokens", 2)
    assert output.status == 0, output.stderr
    assert "[/bold] The depth is 45 feet. [link=x] [red]" in output.stdout


def test_an_answer_that_was_cut_off_is_marked(
    cli: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("ask", "How high is it?", "--db", database, "--max-new-tokens", 3)
    assert cli(*command, "--json").json["finish_reason"] == "length"
    assert " ... [cut off after 3 tokens: --max-new-tokens, " in cli(*command).stdout
    every_token = list(range(tiny_tokenizer().vocab_size))
    own = BlockAttentionLLM.engine_options
    ending = {"max_new_tokens": 9, "eos_token_id": every_token}
    monkeypatch.setattr(BlockAttentionLLM, "engine_options", lambda *a: {**own(*a), **ending})
    assert cli(*command, "--json").json["finish_reason"] == "stop"
    assert "cut off" not in cli(*command).stdout


def test_sources_name_the_page_of_a_pdf(cli: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "towers.pdf"
    path.write_bytes(two_pages("About rivers.", "Halden Tower is 214 metres high."))
    assert cli("ingest", path, "--db", tmp_path / "db", "--model", model).status == 0
    command = ("ask", "How high is Halden Tower?", "--db", tmp_path / "db", "--top-k", 1,
               "--max-new-tokens", 2)  # fmt: skip
    [source] = cli(*command, "--json").json["sources"]
    assert (source["source"], source["page"]) == (str(path), "2")
    assert f"[1] {path} page 2 (" in cli(*command).stdout


def test_control_characters_are_escaped(cli: Command, model: Path, tmp_path: Path) -> None:
    text = "\x1b]0;owned\x07The depth is 45 feet.\x1b[2J\u202e"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "deep\x1b[31m.txt").write_text(text, encoding="utf-8")
    (folder / "\x1b[32m.raw").write_bytes(b"\0")
    ingested = cli("ingest", folder, "--db", tmp_path / "db", "--model", model)
    command = ("ask", "How deep?", "--db", tmp_path / "db", "--max-new-tokens", 2)
    asked = cli(*command)
    assert (ingested.status, asked.status) == (0, 0), ingested.stderr + asked.stderr
    shown = ingested.stdout + ingested.stderr + asked.stdout + asked.stderr
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert r"\x1b]0;owned\x07The depth is 45 feet.\x1b[2J" in asked.stdout
    [source] = cli(*command, "--json").json["sources"]
    assert source["text"].startswith("\x1b]0;owned\x07The")


def test_a_passage_that_a_question_encodes_is_reported(cli: Command, database: Path) -> None:
    for entry in database.rglob("*.safetensors"):
        entry.unlink()  # deletes the passage and the instructions, which `ask` does not count
    asked = cli("ask", "How high?", "--db", database, "--max-new-tokens", 1)
    assert "note: 1 block was computed now; passages are stored" in asked.stderr
    assert "[cut off after 1 token: " in asked.stdout
