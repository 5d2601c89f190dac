from __future__ import annotations

import dataclasses
import inspect
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.cli.adapt import _Lexical, adapt
from blockattn_rag.prompts.formats import Passage
from blockattn_rag.store import DirectoryStore
from blockattn_rag.training.distillation.config import AdaptConfig
from tests.cli.conftest import Command

QUICK = ("--samples", 2, "--batch-size", 2, "--max-new-tokens", 3, "--max-passages", 2, "--rank", 2,
         "--prompt-format", "block-attention", "--json")  # fmt: skip
PASSAGES = [{"title": f"t{n}", "text": f"fact {n} is {n * 7 % 5}"} for n in range(4)]


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_a_reader_is_trained_on_questions_with_their_nearest_passages(
    cli: Command, model: Path, tmp_path: Path
) -> None:
    passages = lines(tmp_path / "passages.jsonl", PASSAGES)
    questions = lines(tmp_path / "q.jsonl", [{"question": f"what is fact {n}?"} for n in range(3)])
    output = cli("adapt", "--model", model, "--passages", passages, "--questions", questions,
                 "--output", tmp_path / "reader", "--target", "q_proj", "--sink", "head:4",
                 "--learning-rate", 1e-5, *QUICK)  # fmt: skip
    assert output.stdout, output.stderr
    found = output.json
    # So small a step may raise the divergence, which the exit status tells.
    assert output.status == (0 if found["improved"] else 1)
    assert ("did not fall" in output.stderr) == (not found["improved"])
    assert (found["steps"], found["train_samples"], found["questions"]) == (1, 2, 3)
    assert {"kl", "agreement"} == set(found["before"]) == set(found["block"])
    adapted = json.loads((tmp_path / "reader" / "adapter_config.json").read_text())
    assert (adapted["r"], adapted["lora_alpha"]) == (2, 4)
    card = (tmp_path / "reader" / "README.md").read_text()
    assert "| sink | head:4 |" in card


def handles_in(store: DirectoryStore) -> Counter[str]:
    """How many entries each text has."""
    found = map(store.describe, store.keys())
    return Counter(info.handle for info in found if info is not None)


def test_a_database_brings_its_model_its_blocks_and_its_retriever(
    cli: Command, model: Path, documents: Path, tmp_path: Path
) -> None:
    ingested = cli("ingest", documents, "--db", tmp_path / "db", "--model", model)
    assert ingested.status == 0, ingested.stderr
    store = DirectoryStore(tmp_path / "db" / "kv")
    before = handles_in(store)
    questions = lines(tmp_path / "q.jsonl", [{"question": f"how high {n}?"} for n in range(3)])
    output = cli("adapt", "--passages", tmp_path / "db", "--questions", questions, "--output",
                 tmp_path / "out", "--learning-rate", 1e-5, *QUICK[:-1],
                 "--prompt-format", "chat", "--json")  # fmt: skip
    assert output.stdout, output.stderr
    assert output.json["questions"] == 3
    # Prompts are made of the blocks that `ask` uses: no passage had to be encoded anew. Their head
    # is a system message here, and a part of the user's message there.
    after = handles_in(store)
    assert after.keys() == before.keys()
    assert sum(after.values()) <= sum(before.values()) + 1


def test_passages_of_a_tenants_database_are_stored_in_his_namespace_and_number_type(
    cli: Command, model: Path, documents: Path, tmp_path: Path
) -> None:
    db = tmp_path / "db"
    tenant = ("--namespace", "customer-17", "--kv-dtype", "int8")
    assert cli("ingest", documents, "--db", db, "--model", model, *tenant).status == 0
    store = DirectoryStore(db / "kv")
    before = set(store.keys())
    questions = lines(tmp_path / "q.jsonl", [{"question": f"how high {n}?"} for n in range(3)])
    # After another sink, passages are other blocks than those that were ingested.
    output = cli("adapt", "--passages", db, "--questions", questions, "--output", tmp_path / "out",
                 "--sink", "head:2", "--learning-rate", 1e-5, *QUICK)  # fmt: skip
    assert output.stdout, output.stderr
    found = [store.describe(key) for key in set(store.keys()) - before]
    assert found
    assert {(one.namespace, one.kv_dtype) for one in found if one} == {("customer-17", "int8")}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "found neither passages nor questions"),
        (("--questions", "q.jsonl"), "found no model; give --model"),
        (("--questions", "q.jsonl", "--model", "MODEL"), "line 1: found a question without"),
        (("--passages", "none.jsonl", "--model", "MODEL"), "found no file none.jsonl"),
        (("--questions", "q.jsonl", "--model", "MODEL", "--fit", "all"), "fit must be of"),
    ],
)
def test_what_cannot_be_done_is_told_in_a_line(
    cli: Command,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    lines(tmp_path / "q.jsonl", [{"question": "what?"}])
    arguments = [str(model) if one == "MODEL" else one for one in given]
    output = cli("adapt", *arguments, "--output", "out")
    assert output.status == 1
    assert message in output.stderr
    assert not (tmp_path / "out.work").exists()


def test_every_setting_has_an_option_with_its_default() -> None:
    parameters = inspect.signature(adapt).parameters
    for setting in dataclasses.fields(AdaptConfig):
        default = parameters[setting.name].default
        if setting.name not in ("output", "sink"):  # no default; that of the database
            assert default == setting.default, setting.name


def test_the_nearest_passages_share_words_with_the_question() -> None:
    passages = [Passage("Tower", "It is high."), Passage("", "The river Teme"), Passage("Sea", "")]
    nearest = _Lexical(passages)
    assert nearest("How long is the river Teme?", 1) == [passages[1]]
    assert len(nearest("the tower", 5)) == 3
