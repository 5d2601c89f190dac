"""``ask --compare`` shows both modes side by side, with the latency that a user observes."""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.app.rag.ask import Assistant, AssistantAnswer
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.store import DirectoryStore
from tests.app.cli.conftest import Command

QUESTION = "How high is Halden Tower?"


def command(db: Path, *options: object) -> tuple[object, ...]:
    return ("ask", QUESTION, "--db", db, "--max-new-tokens", 3, *options)


def test_both_modes_answer_as_in_separate_runs(cli: Command, database: Path) -> None:
    found = cli(*command(database, "--compare", "--json")).json
    for mode in ("block", "full"):
        alone = cli(*command(database, "--mode", mode, "--json")).json
        same = ("mode", "answer", "sources", "hits", "misses", "reused_tokens", "computed_tokens")
        assert {name: found[mode][name] for name in same} == {name: alone[name] for name in same}
    assert (found["block"]["misses"], found["full"]["reused_tokens"]) == (0, 0)
    assert found["answers_are_equal"] == (found["block"]["answer"] == found["full"]["answer"])
    for ratio, name in (("first_token_ratio", "waited_s"), ("answer_ratio", "answered_s")):
        assert found[ratio] == pytest.approx(found["full"][name] / found["block"][name])
    for answer in (found["block"], found["full"]):
        assert 0 < answer["ttft_s"] <= answer["waited_s"] <= answer["answered_s"]


def test_shows_both_times(cli: Command, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "block": AssistantAnswer(QUESTION, "214 m", (), ReuseStats("block", 6, 0, 585, 37, 0, 12),
                        "stop", 0.2, answered_s=0.5),
        "full": AssistantAnswer(QUESTION, "214 m", (), ReuseStats("full", 0, 0, 0, 622, 0, 12),
                       "stop", 3.0, answered_s=4.0),
    }  # fmt: skip
    monkeypatch.setattr(Assistant, "ask", lambda *_, **options: answers[options["mode"]])
    rows = [
        " ".join(row.split()) for row in cli(*command(database, "--compare")).stdout.split("\n")
    ]
    assert "Both modes, 622 prompt tokens" in rows
    assert "block mode full mode full / block" in rows
    assert "first token 200 ms 3.00 s 15.0 x" in rows
    assert "whole answer 500 ms 4.00 s 8.0 x" in rows
    assert "prompt tokens computed 37 622" in rows
    assert "prompt tokens reused 585 0" in rows
    assert any(row.startswith("The answers are equal.") for row in rows)


def test_several_questions_end_with_medians(
    cli: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {"block": cycle((0.1, 0.9, 0.2)), "full": cycle((1.0, 3.0, 2.0))}

    def ask(_: Assistant, question: str, *, mode: Any, **__: Any) -> AssistantAnswer:
        waited_s = next(times[mode])
        text = "214 m" if question == "a" or mode == "full" else "no"
        stats = ReuseStats(mode, 0, 0, 0, 622, 0, 12)
        return AssistantAnswer(question, text, (), stats, "stop", waited_s, answered_s=waited_s + 1)

    monkeypatch.setattr(Assistant, "ask", ask)
    compare = ("ask", "--db", database, "--compare")
    lines = cli(*compare, "--json", given="a\nb\nc\n").stdout.splitlines()
    assert len(lines) == 4
    assert json.loads(lines[-1])["medians"] == {
        "questions": 3, "equal_answers": 1, "waited_s": {"block": 0.2, "full": 2.0},
        "first_token_ratio": 10.0, "answered_s": {"block": 1.2, "full": 3.0}, "answer_ratio": 2.5,
    }  # fmt: skip
    shown = cli(*compare, given="a\nb\nc\n").stdout
    rows = [" ".join(row.split()) for row in shown.split("\n")]
    medians = rows[rows.index("Medians of 3 questions") :]
    assert "first token 200 ms 2.00 s 10.0 x" in medians
    assert "whole answer 1.20 s 3.00 s 2.5 x" in medians
    assert "The answers to 1 of 3 questions are equal." in medians


def test_one_question_has_no_medians(cli: Command, database: Path) -> None:
    output = cli(*command(database, "--compare"))
    assert "Both modes" in output.stdout
    assert "Medians" not in output.stdout
    [line] = cli(*command(database, "--compare", "--json")).stdout.splitlines()
    for mode in ("block", "full"):
        assert json.loads(line)[mode]["includes_warm_up"] is False


def test_the_warm_up_favors_neither_mode(
    cli: Command, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    original = DirectoryStore.get, Assistant.ask

    def get(self: DirectoryStore, key: str, *args: Any, **options: Any) -> Any:
        found = original[0](self, key, *args, **options)
        if found is not None and found.handle == passage:
            events.append("passage read")
        return found

    def ask(self: Assistant, question: str, **options: Any) -> AssistantAnswer:
        events.append(options["mode"])
        return original[1](self, question, **options)

    stored = set(DirectoryStore(database / "kv").keys())
    passage = handle_of("Halden Tower is 214 metres high.")
    monkeypatch.setattr(DirectoryStore, "get", get)
    monkeypatch.setattr(Assistant, "ask", ask)
    cli(*command(database, "--compare", "--json"))
    assert events == ["block", "passage read", "full"]
    assert set(DirectoryStore(database / "kv").keys()) == stored


def test_passages_encoded_by_block_mode_are_reported(cli: Command, database: Path) -> None:
    for entry in (database / "kv").rglob("*.safetensors"):
        entry.unlink()
    shown = cli(*command(database, "--compare")).stdout
    assert "Block mode had to encode 1 block of the prompt; ask again" in shown
    assert "had to encode" not in cli(*command(database, "--compare")).stdout


def test_a_repeated_question_is_answered_again(cli: Command, filled: Path) -> None:
    output = cli("ask", "--db", filled, "--max-new-tokens", 2, "--compare", "--json",
                 given=f"{QUESTION}\n{QUESTION}\n")  # fmt: skip
    *questions, _ = map(json.loads, output.stdout.splitlines())
    found = [question["block"] for question in questions]
    assert found[0]["computed_tokens"] == found[1]["computed_tokens"] > 1
