"""Unusable arguments are reported before anything is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.app.cli.conftest import Command
from tests.lab.evaluation.samples import record, write_jsonl

CREATE = "ingest documents --db new --model {model}"
ADD = "ingest documents --db {db}"
ASK = "ask How? --db {db}"
EVAL = "eval --model no/model"
PLAN = "plan --model 8b --tflops 1"
TRAIN = "train --model bundled --data q.jsonl --output out"
CACHE, FOLDER = "a cache that evicts entries", "file:///no/such/folder"


@pytest.fixture
def folder(documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder, with documents, questions, passages and values of options."""
    passages = [{"title": f"t{n}", "text": f"fact {n} is {n * 7 % 5}"} for n in range(6)]
    write_jsonl(tmp_path / "p.jsonl", passages)
    write_jsonl(tmp_path / "q.jsonl", [{"question": "what?"}])
    write_jsonl(tmp_path / "d.jsonl", [record(1)])
    (tmp_path / "half.json").write_text("{", encoding="utf-8")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "list.json").write_text("[1]", encoding="utf-8")
    (tmp_path / "true.json").write_text("true", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("ask How? --db nowhere", 1, "nowhere is not a database"),
        ("ask ' ' --db {db}", 2, "The question is empty"),
        (f"{ASK} --mode fast", 2, "'fast' is not one of 'block', 'full'"),
        (f"{ASK} --compare --mode full", 2, "remove --mode"),
        (f"{ASK} --recipe nowhere", 1, "Found no recipe at nowhere"),
        (f"{ASK} --chat-template-kwargs {{{{", 2, "Invalid JSON"),
        (f"{ASK} --chat-template-kwargs [1]", 2, "expected an object"),
        (
            f"{ASK} --chat-template-kwargs '{{{{\"enable_thinking\": false}}}}'", 1,
            "Found enable_thinking in chat_template_kwargs, but the chat",
        ),
        ("ask How? --db nowhere --schema half.json", 2, "Invalid JSON: Expecting property name"),
        ("ask How? --db nowhere --schema binary.json", 2, "Invalid JSON: 'utf-16"),
        ("ask How? --db nowhere --schema list.json", 2, "object such as {{\"type\": \"object\", "),
        ("ask How? --db nowhere --schema true.json", 2, "Found true"),
        ("check", 2, "Expected either MODEL or --server; found neither"),
        ("check bundled --server http://gpu", 2, "Expected either MODEL or --server; found both"),
        ("check --server http://127.0.0.1:9", 1, "Cannot reach http://127"),
        ("check --recipe bos --server http://127.0.0.1:9", 2, "--recipe requires MODEL"),
        ("check no/model --recipe nowhere", 1, "Found no recipe at nowhere"),
        ("check ./no/model", 1, "No such model"),
        ("check no/model", 1, "a folder, a .gguf file, a hub id, 'bundled' or 'smollm2'."),
        ("demo --web --json", 2, "remove --json"),
        ("demo --web --db x --store y", 2, "remove --store"),
        (EVAL, 2, "Expected either --data FILE or --log FILE"),
        (f"{EVAL} --data d --log l", 2, "Expected either --data FILE or --log FILE"),
        (f"{EVAL} --log l --closed-book", 2, "--closed-book requires --data"),
        (f"{EVAL} --data d.jsonl --recipes none,nowhere", 1, "Found no recipe at nowhere"),
        ("eval --model bundled --data q.jsonl", 1, "q.jsonl, line 1: "),
        ("eval --model /no/model --data x", 1, "No such model"),
        ("eval", 2, "Expected --model NAME, or --db FOLDER"),
        ("eval --db mydb", 2, "--db and --questions must be used together"),
        ("eval --questions q.jsonl", 2, "--db and --questions must be used together"),
        ("eval --db mydb --questions q.jsonl --recipes fast", 2, "combined with --recipes"),
        ("eval --db d --questions q.jsonl --output o --dtype int8", 2, "with --output, --dtype"),
        ("ingest documents --db new", 2, "--model"),
        ("ingest documents --db new --model no/model", 1, "error: Cannot load no/model: "),
        ("ingest --db new --model bundled -- -v", 1, "No such file or folder: -v"),
        (f"{CREATE} --embedding ./nowhere", 1, "No such embedding: ./nowhere; expected the folder"),
        (f"{CREATE} --embedding BAAI/b", 1, "pip install llama-index-embeddings-huggingface"),
        (f"{CREATE} --store memory:", 2, "is lost when this command ends"),
        (f"{CREATE} --store s3:/bucket/kv", 2, "two slashes"),
        (f"{CREATE} --store ftp://host/kv", 1, "Unknown store address ftp://"),
        (f"{CREATE} --store s3://me:secret@bucket/kv", 1, "must not contain a user, password"),
        (f"{CREATE} --server http://127.0.0.1:9", 1, "Cannot reach http://127.0.0.1:9"),
        (f"{CREATE} --server http://gpu --store kv", 2, "--server, which has its own store"),
        (f"{CREATE} --server http://gpu --dtype bfloat16", 2, "--server, which has its own dtype"),
        (
            f"{CREATE} --server http://gpu --recipe head:4 --kv-dtype int8", 2,
            "Cannot be combined with --server, which has its own recipe and kv_dtype",
        ),
        (f"{ADD} --embedding BAAI/b", 1, "made with embedding 'hashing'"),
        (f"{ADD} --recipe nowhere", 1, "Found no recipe at nowhere"),
        (f"{ADD} --namespace t/wo", 2, "A namespace consists of"),
        (f"{ADD} --kv-dtype int4", 2, "'int4' is not one of"),
        (PLAN, 2, "Missing option '--passages'"),
        (f"{PLAN} --passages 0", 2, "greater than or equal to 1"),
        (f"{PLAN} --passages 3 --tflops 0", 2, "Found 0, expected more than 0"),
        (f"{PLAN} --passages 3 --kv-dtype int4", 2, "'int4' is not one of"),
        ("repair", 2, "Expected --db FOLDER, or --model NAME with --passages FILE"),
        ("repair --model {model}", 2, "Expected --db FOLDER, or --model NAME with --passages FILE"),
        ("repair --db db --passages p.jsonl", 2, "Expected either --db or --passages, found both"),
        ("repair --db nowhere --output out", 1, "nowhere is not a database"),
        ("repair --model {model} --questions q.jsonl --output out", 1, "line 1: A question has no"),
        ("repair --model {model} --passages no.jsonl --output out", 1, "No such file: no.jsonl"),
        (
            "repair --model {model} --passages p.jsonl --output out --minutes 1", 1,
            "generated no usable question from 6 ",
        ),
        ("remove x.txt --db nowhere", 1, "nowhere is not a database"),
        ("store stats .", 1, "No store at"),
        ("store stats nowhere", 1, "No such KV store: nowhere"),
        *(
            (f"store {command} {address}", 1, message)
            for command in ("stats", "ls", "verify", "gc")
            for address, message in (
                ("memory:", CACHE), ("redis://me:secret@127.0.0.1:1/0", CACHE),
                (FOLDER, "No such KV store"), ("ftp://host/kv", "Unknown store address ftp://"),
                ("s3:/bucket/kv", "two slashes"),
            )
        ),
        *(
            (f"store shrink {{db}} '--max-bytes={size}'", 2, "Expected a size such as 500MB, 20GB")
            for size in ("", "0", "0.5", "-1", "much", "1PB", "1ib", "GB")
        ),
        *(
            (f"store gc {{db}} '--grace={grace}'", 2, "Expected a time such as 90s, 30m")
            for grace in ("1y", "", "-1", "h")
        ),
        ("store gc {db} --ttl soon", 2, "Expected a time such as 90s, 30m"),
        ("store gc {db} --db typo", 1, "has no Chroma database"),
        *(
            (f"store verify {{db}} --sample {share}", 2, "Expected a fraction such as 1% or 0.01")
            for share in ("0", "101%", "2", "half")
        ),
        (f"{TRAIN} --learning-rate 0", 1, "Invalid learning_rate 0.0: expected more than 0"),
        (f"{TRAIN} --batch-size 0", 2, "--batch-size"),
    ],
)  # fmt: skip
def test_unusable_arguments_are_reported_and_nothing_is_written(
    cli: Command, folder: Path, filled: Path, model: Path, command: str, status: int, message: str
) -> None:
    before = {*folder.rglob("*"), *filled.rglob("*")}
    output = cli(*shlex.split(command.format(db=filled, model=model)), status=status)
    assert output.stdout == ""
    assert message.format() in output.message
    assert "secret" not in output.stderr
    assert {*folder.rglob("*"), *filled.rglob("*")} == before


@pytest.mark.parametrize(
    "command",
    [
        ("ingest", "a\0b", "--db", "new", "--model", "bundled"),
        ("ask", "What?", "--db", "a\0b"),
        ("eval", "--model", "bundled", "--data", "a\0b"),
        ("store", "stats", "a\0b"),
    ],
)
def test_a_nul_character_in_any_argument_is_a_usage_error(
    cli: Command, command: tuple[str, ...]
) -> None:
    output = cli(*command, status=2)
    assert output.stdout == ""
    assert "NUL character" in output.message
    assert r"a\x00b" in output.message
