from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from blockattn_rag.app.cli.output import size
from blockattn_rag.app.rag.database import MANIFEST
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.model import BlockModel
from blockattn_rag.store import DirectoryStore
from tests.app.cli.conftest import Command, change_manifest
from tests.app.rag.test_documents import forbid, two_pages
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of


@pytest.fixture
def ask(cli: Command, tmp_path: Path) -> Command:
    """Function that asks the database in ``tmp_path / "db"``."""
    return partial(cli, "ask", "How high is Halden Tower?", "--max-new-tokens", 3, "--db",
                   tmp_path / "db")  # fmt: skip


@pytest.fixture
def ingest_file(cli: Command, model: Path, tmp_path: Path) -> Command:
    """Function that ingests files into ``tmp_path / "db"`` with ``model``."""
    return partial(cli, "ingest", "--db", tmp_path / "db", "--model", model)


def test_second_ingest_is_empty(ingest: Command) -> None:
    first = ingest("--json").json
    assert (first["documents"], first["passages"], first["added"]) == (2, 2, 2)
    assert (first["computed"], first["reused"]) == (2, 0)
    assert first["computed_tokens"] > 0
    assert first["tokens_per_s"] > 0
    assert first["stored_bytes"] > 0
    assert [Path(s["file"]).name for s in first["skipped"]] == ["picture.raw"]
    again = ingest("--json").json
    assert (again["added"], again["removed"], again["computed"], again["reused"]) == (0, 0, 0, 2)
    assert again["stored_bytes"] == 0


INTERRUPTED = patch("blockattn_rag.app.rag.ingest.synchronize", side_effect=KeyboardInterrupt)


def test_the_next_ingestion_completes_one_interrupted_before_chroma(ingest: Command) -> None:
    with INTERRUPTED:
        ingest("--json", status=130)
    report = ingest("--json").json
    assert (report["computed"], report["reused"], report["added"]) == (0, 2, 2)


def test_files_that_cannot_be_opened_are_skipped(
    ingest: Command, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest()
    (documents / "more" / "lake.txt").write_text("The Ossa Lake is deep.", encoding="utf-8")
    with monkeypatch.context() as patched:
        forbid(patched, documents / "tower.txt")
        output, shown = ingest("--json", status=3), ingest(status=3)
    report, file = output.json, str(documents / "tower.txt")
    reason = "cannot be opened (Permission denied)"
    assert report["inaccessible"] == [{"path": file, "reason": reason}]
    assert (report["documents"], report["added"], report["orphaned"]) == (2, 1, [])
    assert f"Skipped: {file}: {reason}" in shown.stderr
    assert f"error: Could not open 1 file or folder: {file}; everything else" in shown.stderr
    assert ingest("--json").json["inaccessible"] == []


def test_replaces_changed_files(ingest: Command, documents: Path, ask: Command) -> None:
    ingest()
    (documents / "tower.txt").write_text("Halden Tower is 300 metres high.", encoding="utf-8")
    report = ingest("--json").json
    assert (report["added"], report["removed"], report["computed"]) == (1, 1, 1)
    first, _ = ask("--json").json["sources"]
    assert first["text"] == "Halden Tower is 300 metres high."


def test_settings_of_a_database_are_saved_and_used_by_ask(
    cli: Command, ingest: Command, ask: Command, documents: Path, tmp_path: Path
) -> None:
    settings = {"recipe": "head:3", "namespace": "one", "kv_dtype": "int8"}
    options = ("--recipe", "head:3", "--namespace", "one", "--kv-dtype", "int8")
    first = ingest(*options, "--json").json
    again = cli("ingest", documents, "--db", tmp_path / "db", "--json").json
    for report, counts in ((first, (2, 0)), (again, (0, 2))):
        assert (report["computed"], report["reused"]) == counts
        assert settings.items() <= report.items()
    answer = ask("--json").json
    assert (answer["hits"], answer["misses"], answer["int8_blocks"]) == (3, 0, 3)
    assert "(3 in int8);" in " ".join(ask().stdout.split())


def test_ingest_changes_saved_settings_only_on_request(
    cli: Command, database: Path, documents: Path
) -> None:
    change_manifest(database, stock="head:2")
    command = ("ingest", documents, "--db", database)
    found = [cli(*command, *more).stdout for more in ((), ("--recipe", "auto"))]
    assert "recipe for block mode: head:2" in found[0]
    assert "recipe for block mode: head+recompute:0.1" in found[1]
    manifest = json.loads((database / MANIFEST).read_text())
    assert manifest["stock"] == "head+recompute:0.1"


def test_finds_recipe_of_database(ask: Command, database: Path, loaded: BlockModel) -> None:
    plain = ask("--json").json
    recipe_of(loaded, sink="head:4").save(database / "recipe")
    found = [ask("--json").json for _ in range(2)]
    assert (plain["misses"], found[0]["misses"], found[1]["misses"]) == (0, 1, 0)


def test_keeps_kv_dtype(ask: Command, ingest: Command) -> None:
    assert ingest("--json", "--kv-dtype", "int8").json["computed"] == 2
    again = ingest("--json", "--kv-dtype", "model").json
    assert (again["reused"], again["kv_dtype"]) == (2, "model")
    assert ask("--json").json["int8_blocks"] == 3


def test_splits_long_documents(ingest_file: Command, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("One more sentence of text. " * 40, encoding="utf-8")
    report = ingest_file(text, "--chunk-size", 200, "--json").json
    assert report["passages"] >= 6
    # The sentences repeat, and equal passages share one block.
    assert report["computed"] + report["reused"] <= report["passages"]
    # The chunk size was saved.
    assert ingest_file(text, "--json").json["passages"] == report["passages"]


def test_an_answer_lists_its_sources_and_reuse(ask: Command, database: Path) -> None:
    *_, source, reuse = ask().stdout.splitlines()
    assert source.startswith("[1] ")
    assert "Halden Tower is 214 metres high." in source
    assert reuse.startswith("block mode: 2 blocks reused, 0 computed;")
    assert "first token after" in reuse
    assert "int8" not in reuse


def test_first_answer_reuses_every_block(ask: Command, database: Path) -> None:
    first, second = ask("--json").json, ask("--json").json
    for answer in (first, second):
        assert (answer["hits"], answer["misses"]) == (2, 0)
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


def test_full_mode_reuses_nothing(ask: Command, database: Path) -> None:
    answer = ask("--mode", "full", "--json").json
    assert (answer["mode"], answer["hits"], answer["reused_tokens"]) == ("full", 0, 0)
    assert "full mode: nothing reused, " in ask("--mode", "full").stdout


def test_ask_takes_a_recipe(
    ask: Command, database: Path, loaded: BlockModel, other_model: Path, tmp_path: Path
) -> None:
    recipe_of(loaded, sink="bos", promote=1).save(tmp_path / "recipe")
    chosen = ("--recipe", tmp_path / "recipe")
    answer, plain = ask(*chosen, "--json").json, ask("--json").json
    assert answer["hits"] + answer["misses"] == plain["hits"] + plain["misses"] - 1
    assert "promote:1" in ask(*chosen).stdout
    refused = ask(*chosen, "--model", other_model, status=1)
    assert "belongs to" in refused.stderr


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def test_asking_with_another_model_logs_a_warning(
    ask: Command, database: Path, other_model: Path
) -> None:
    output = ask("--json", "--model", other_model)
    assert output.json["misses"] == 1
    assert "passages will be encoded again on first use" in output.stderr
    assert ask("--json", "--model", other_model).json["misses"] == 0


def test_ingesting_with_another_model_is_refused(
    cli: Command, database: Path, documents: Path, model: Path
) -> None:
    output = cli("ingest", documents, "--db", database, "--model", "bundled", status=1)
    assert output.stderr.startswith(f"error: {database} has passages encoded by {model}, found ")
    assert "remove --model, or ingest into a new folder" in output.stderr
    cli("ingest", documents, "--db", database, "--model", model)


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
    cli: Command, ingest: Command, documents: Path, tmp_path: Path
) -> None:
    db = tmp_path / "db"
    ingest("--embedding", "no/such-one", status=1)
    assert not (db / MANIFEST).exists()
    with INTERRUPTED:
        cli("ingest", documents, "--db", db, "--model", "bundled", status=130)
    change_manifest(db, embedding="no/such-one")
    report = ingest("--embedding", "hashing", "--json").json
    assert (report["added"], report["embedding"]) == (2, "hashing")


@pytest.mark.parametrize("kv_dtype", ["model", "int8"])
def test_ingest_prints_an_exact_estimate_of_the_work(
    ingest: Command, tmp_path: Path, kv_dtype: str
) -> None:
    output = ingest("--kv-dtype", kv_dtype, "--json")
    tokens, nbytes = output.json["computed_tokens"], output.json["stored_bytes"]
    [line] = [line for line in output.stderr.splitlines() if " to encode: about " in line]
    assert line.startswith(f"2 passages of {tokens} tokens to encode: about {size(nbytes)} of keys")
    assert f" and values in {tmp_path / 'db' / 'kv'}, " in line
    assert " free, about " in line
    text = "Halden Tower is 214 metres high." + "# Rivers\n\nThe Ossa River is long."
    [rate] = re.findall(r"1 MB of such text takes about ([\d.]+ \w+) with", output.stderr)
    assert rate == size(nbytes / len(text) * 1e6)
    assert " to encode: " not in ingest().stderr  # everything is stored


def test_an_ingestion_that_exceeds_the_free_disk_space_is_refused(
    ingest: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("blockattn_rag.app.cli.ingest.shutil.disk_usage", lambda _: usage)
    output = ingest(status=1)
    assert "free, but the keys and values of 2 passages take about " in output.stderr
    assert "--kv-dtype int8" in output.stderr
    assert not [*(tmp_path / "db").rglob("*.safetensors")]


def test_int8_is_suggested_for_large_databases(
    ingest: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--kv-dtype int8" not in ingest().stderr
    monkeypatch.setattr("blockattn_rag.app.cli.ingest.LARGE_BYTES", 1)
    assert "note: with --kv-dtype int8 they would" in ingest("--namespace", "large").stderr


def test_equal_texts_are_reported(ingest: Command, documents: Path) -> None:
    shutil.copy(documents / "tower.txt", documents / "copy.txt")
    assert "stored; shared with 1 duplicate passage" in ingest().stdout


def test_a_database_without_passages_is_reported(cli: Command, database: Path) -> None:
    change_manifest(database, collection="empty")
    output = cli("ask", "How?", "--db", database, status=1)
    assert "contains no passages" in output.stderr


def test_square_brackets_in_a_passage_are_not_markup(
    ingest_file: Command, ask: Command, tmp_path: Path
) -> None:
    text = "[/bold] The depth is 45 feet. [link=x] [red]"
    (tmp_path / "brackets.txt").write_text(text, encoding="utf-8")
    ingest_file(tmp_path / "brackets.txt")
    assert text in ask().stdout


def test_an_answer_that_was_cut_off_is_marked(
    ask: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask("--json").json["finish_reason"] == "length"
    assert " ... [cut off after 3 tokens: --max-new-tokens, " in ask().stdout
    every_token = list(range(tiny_tokenizer().vocab_size))
    own = BlockAttentionLLM.engine_options
    ending = {"max_new_tokens": 9, "eos_token_id": every_token}
    monkeypatch.setattr(BlockAttentionLLM, "engine_options", lambda *a: {**own(*a), **ending})
    assert ask("--json").json["finish_reason"] == "stop"
    assert "cut off" not in ask().stdout


def test_sources_name_the_page_of_a_pdf(ingest_file: Command, ask: Command, tmp_path: Path) -> None:
    path = tmp_path / "towers.pdf"
    path.write_bytes(two_pages("About rivers.", "Halden Tower is 214 metres high."))
    ingest_file(path)
    [source] = ask("--top-k", 1, "--json").json["sources"]
    assert (source["source"], source["page"]) == (str(path), "2")
    assert f"[1] {path} page 2 (" in ask("--top-k", 1).stdout


def test_control_characters_are_escaped(ingest_file: Command, ask: Command, tmp_path: Path) -> None:
    text = "\x1b]0;owned\x07The depth is 45 feet.\x1b[2J\u202e"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "deep\x1b[31m.txt").write_text(text, encoding="utf-8")
    (folder / "\x1b[32m.raw").write_bytes(b"\0")
    ingested, asked = ingest_file(folder), ask()
    shown = ingested.stdout + ingested.stderr + asked.stdout + asked.stderr
    assert not {"\x1b", "\x07", "\u202e"} & set(shown)
    assert r"\x1b]0;owned\x07The depth is 45 feet.\x1b[2J" in asked.stdout
    [source] = ask("--json").json["sources"]
    assert source["text"].startswith("\x1b]0;owned\x07The")


def test_a_passage_that_a_question_encodes_is_reported(cli: Command, database: Path) -> None:
    for entry in database.rglob("*.safetensors"):
        entry.unlink()  # deletes the passage and the instructions, which `ask` does not count
    asked = cli("ask", "How high?", "--db", database, "--max-new-tokens", 1)
    assert "note: 1 block was computed now; passages are stored" in asked.stderr
    assert "[cut off after 1 token: " in asked.stdout


def test_store_option_is_kept(ask: Command, ingest: Command, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    report = ingest("--store", f"file://{elsewhere}", "--json").json
    assert report["store"] == f"file://{elsewhere}"
    assert not (tmp_path / "db" / "kv").exists()
    assert DirectoryStore(elsewhere).stats().entries >= 2
    again = ingest("--json").json
    assert (again["computed"], again["reused"]) == (0, 2)
    assert ask("--json").json["hits"] > 0


def test_folders_are_recorded_as_absolute_paths(
    ingest: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ingest("--store", "near", "--json").json["store"] == str(tmp_path / "near")
