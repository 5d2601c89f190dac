from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from blockattn_rag.app.cli.output import size
from blockattn_rag.app.rag.database import MANIFEST
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.model import BlockModel
from blockattn_rag.store import DirectoryStore
from tests.app.cli.conftest import Command
from tests.app.rag.test_documents import forbid, two_pages
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

QUESTION = ("How high is Halden Tower?", "--max-new-tokens", 3, "--db")


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


def test_the_next_ingestion_completes_one_interrupted_before_chroma(
    ingest: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("blockattn_rag.app.rag.ingest.synchronize", interrupt)
        ingest("--json", status=130)
    report = ingest("--json").json
    assert (report["computed"], report["reused"], report["added"]) == (0, 2, 2)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_files_that_cannot_be_opened_are_skipped(
    ingest: Command, documents: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ingest()
    (documents / "more" / "lake.txt").write_text("The Ossa Lake is deep.", encoding="utf-8")
    with monkeypatch.context() as patch:
        forbid(patch, documents / "tower.txt")
        output, shown = ingest("--json", status=3), ingest(status=3)
    report, file = output.json, str(documents / "tower.txt")
    assert report["inaccessible"] == [
        {"path": file, "reason": "cannot be opened (Permission denied)"}
    ]
    assert (report["documents"], report["added"], report["orphaned"]) == (2, 1, [])
    assert f"Skipped: {file}: cannot be opened (Permission denied)" in shown.stderr
    assert f"error: Could not open 1 file or folder: {file}; everything else" in shown.stderr
    assert ingest("--json").json["inaccessible"] == []


def test_replaces_changed_files(
    cli: Command, ingest: Command, documents: Path, tmp_path: Path
) -> None:
    ingest()
    (documents / "tower.txt").write_text("Halden Tower is 300 metres high.", encoding="utf-8")
    report = ingest("--json").json
    assert (report["added"], report["removed"], report["computed"]) == (1, 1, 1)
    first, _ = cli("ask", *QUESTION, tmp_path / "db", "--json").json["sources"]
    assert first["text"] == "Halden Tower is 300 metres high."


def test_settings_of_a_database_are_saved_and_used_by_ask(
    cli: Command, ingest: Command, documents: Path, tmp_path: Path
) -> None:
    settings = {"recipe": "head:3", "namespace": "one", "kv_dtype": "int8"}
    options = ("--recipe", "head:3", "--namespace", "one", "--kv-dtype", "int8")
    first = ingest(*options, "--json").json
    again = cli("ingest", documents, "--db", tmp_path / "db", "--json").json
    for report, counts in ((first, (2, 0)), (again, (0, 2))):
        assert (report["computed"], report["reused"]) == counts
        assert settings.items() <= report.items()
    ask = ("ask", *QUESTION, tmp_path / "db")
    answer = cli(*ask, "--json").json
    assert (answer["hits"], answer["misses"], answer["int8_blocks"]) == (3, 0, 3)
    assert "(3 in int8);" in " ".join(cli(*ask).stdout.split())


def test_ingest_changes_saved_settings_only_on_request(
    cli: Command, database: Path, documents: Path
) -> None:
    path = database / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stock": "head:2"}))
    command = ("ingest", documents, "--db", database)
    found = [cli(*command, *more).stdout for more in ((), ("--recipe", "auto"))]
    assert "recipe for block mode: head:2" in found[0]
    assert "recipe for block mode: head+recompute:0.1" in found[1]
    assert json.loads(path.read_text())["stock"] == "head+recompute:0.1"


def test_finds_recipe_of_database(cli: Command, database: Path, model: Path) -> None:
    command = ("ask", *QUESTION, database, "--json")
    plain = cli(*command).json
    loaded = BlockModel.from_pretrained(model)
    recipe_of(loaded, sink="head:4").save(database / "recipe")
    found = [cli(*command).json for _ in range(2)]
    assert (plain["misses"], found[0]["misses"], found[1]["misses"]) == (0, 1, 0)


def test_keeps_kv_dtype(cli: Command, ingest: Command, tmp_path: Path) -> None:
    assert ingest("--json", "--kv-dtype", "int8").json["computed"] == 2
    again = ingest("--json", "--kv-dtype", "model").json
    assert (again["reused"], again["kv_dtype"]) == (2, "model")
    assert cli("ask", *QUESTION, tmp_path / "db", "--json").json["int8_blocks"] == 3


def test_splits_long_documents(cli: Command, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "long.txt"
    text.write_text("One more sentence of text. " * 40, encoding="utf-8")
    command = ("ingest", text, "--db", tmp_path / "db", "--model", model, "--json")
    report = cli(*command, "--chunk-size", 200).json
    assert report["passages"] >= 6
    # The sentences repeat, and equal passages share one block.
    assert report["computed"] + report["reused"] <= report["passages"]
    assert cli(*command).json["passages"] == report["passages"]  # the chunk size was saved


def test_an_answer_lists_its_sources_and_reuse(cli: Command, database: Path) -> None:
    output = cli("ask", *QUESTION, database)
    *_, source, reuse = output.stdout.splitlines()
    assert source.startswith("[1] ")
    assert "Halden Tower is 214 metres high." in source
    assert reuse.startswith("block mode: 2 blocks reused, 0 computed;")
    assert "first token after" in reuse
    assert "int8" not in reuse


def test_first_answer_reuses_every_block(cli: Command, database: Path) -> None:
    command = ("ask", *QUESTION, database, "--json")
    first, second = cli(*command).json, cli(*command).json
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


def test_full_mode_reuses_nothing(cli: Command, database: Path) -> None:
    command = ("ask", *QUESTION, database, "--mode", "full")
    answer = cli(*command, "--json").json
    assert (answer["mode"], answer["hits"], answer["reused_tokens"]) == ("full", 0, 0)
    assert "full mode: nothing reused, " in cli(*command).stdout


def test_ask_takes_a_recipe(
    cli: Command, database: Path, model: Path, other_model: Path, tmp_path: Path
) -> None:
    command = ("ask", *QUESTION, database)
    recipe_of(BlockModel.from_pretrained(model), sink="bos", promote=1).save(tmp_path / "recipe")
    chosen = (*command, "--recipe", tmp_path / "recipe")
    answer = cli(*chosen, "--json").json
    plain = cli(*command, "--json").json
    assert answer["hits"] + answer["misses"] == plain["hits"] + plain["misses"] - 1
    assert "promote:1" in cli(*chosen).stdout
    refused = cli(*chosen, "--model", other_model, status=1)
    assert "belongs to" in refused.stderr


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def test_asking_with_another_model_logs_a_warning(
    cli: Command, database: Path, other_model: Path
) -> None:
    command = ("ask", *QUESTION, database, "--json", "--model", other_model)
    output = cli(*command)
    assert output.json["misses"] == 1
    assert "passages will be encoded again on first use" in output.stderr
    assert cli(*command).json["misses"] == 0


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
    cli: Command, ingest: Command, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    db = tmp_path / "db"
    ingest("--embedding", "no/such-one", status=1)
    assert not (db / MANIFEST).exists()
    with monkeypatch.context() as patch:
        patch.setattr("blockattn_rag.app.rag.ingest.synchronize", interrupt)
        cli("ingest", documents, "--db", db, "--model", "bundled", status=130)
    manifest = json.loads((db / MANIFEST).read_text(encoding="utf-8"))
    (db / MANIFEST).write_text(json.dumps(manifest | {"embedding": "no/such-one"}))
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
    assert "stored; 1 passage of equal text share them" in ingest().stdout


def test_a_database_without_passages_is_reported(cli: Command, database: Path) -> None:
    manifest = json.loads((database / MANIFEST).read_text(encoding="utf-8"))
    manifest["collection"] = "empty"
    (database / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    output = cli("ask", "How?", "--db", database, status=1)
    assert "contains no passages" in output.stderr


def test_square_brackets_in_a_passage_are_not_markup(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    text = tmp_path / "brackets.txt"
    text.write_text("[/bold] The depth is 45 feet. [link=x] [red]", encoding="utf-8")
    cli("ingest", text, "--db", tmp_path / "db", "--model", model)
    output = cli("ask", "How deep?", "--db", tmp_path / "db", "--max-new-tokens", 2)
    assert "[/bold] The depth is 45 feet. [link=x] [red]" in output.stdout


def test_an_answer_that_was_cut_off_is_marked(
    cli: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("ask", *QUESTION, database)
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
    cli("ingest", path, "--db", tmp_path / "db", "--model", model)
    command = ("ask", *QUESTION, tmp_path / "db", "--top-k", 1)
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


def test_store_option_is_kept(cli: Command, ingest: Command, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    report = ingest("--store", f"file://{elsewhere}", "--json").json
    assert report["store"] == f"file://{elsewhere}"
    assert not (tmp_path / "db" / "kv").exists()
    assert DirectoryStore(elsewhere).stats().entries >= 2
    again = ingest("--json").json
    assert (again["computed"], again["reused"]) == (0, 2)
    assert cli("ask", *QUESTION, tmp_path / "db", "--json").json["hits"] > 0


def test_folders_are_recorded_as_absolute_paths(
    ingest: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ingest("--store", "near", "--json").json["store"] == str(tmp_path / "near")
