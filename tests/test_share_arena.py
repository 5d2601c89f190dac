"""The driver for KVShareArena: its three steps, costs and result fields. The texts in these tests
are our own, in the file format of the leaderboard."""

from __future__ import annotations

import copy
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.engines import tuned_engine, with_settings

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import share_arena  # noqa: E402

SOURCES = ["Halden Tower is 214 metres tall. ", "Lake Gulnock covers 310 hectares. "]
QUESTIONS = [
    {"_id": "a", "input": "How tall is it?", "answers": ["214 metres"], "chunks": SOURCES},
    {"_id": "b", "input": "How large is it?", "answers": ["310"], "chunks": SOURCES[::-1]},
    {"_id": "c", "input": "Where is it?", "answers": ["nowhere", "no"], "chunks": SOURCES[:1]},
]
FORM = "Read this.\n{context}\n\nAsked: {input}\nAnswer:"
# Fields that the leaderboard requires (version of September 2026).
SUMMARY = {"method", "track", "subset", "model", "n", "backend", "versions", "git_rev"}
COSTS = {"recomputed_layer_tokens", "dense_payload_layer_tokens", "kv_bytes", "ttft_ms"}
ITEM = {"_id", "pred", "golds", "f1_raw"} | COSTS
CARD = {"name", "provenance", "backend", "versions", "cost_notes", "training_data"}


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    """A folder with files in the format of the leaderboard."""
    assets, data = tmp_path / "kvsharearena/assets", tmp_path / "data/queryset"
    assets.mkdir(parents=True)
    data.mkdir(parents=True)
    (assets / "prompts.json").write_text(json.dumps({"P_c": "Be brief."}))
    forms = {"dataset2prompt": {"small": FORM}, "dataset2maxlen": {"small": 5}}
    (assets / "longbench_config.json").write_text(json.dumps(forms))
    lines = "".join(json.dumps(question) + "\n" for question in QUESTIONS)
    (data / "small_n100.jsonl").write_text(lines)
    digest = hashlib.sha256(lines.encode()).hexdigest()
    (data / "sha256.json").write_text(json.dumps({"small_n100.jsonl": digest}))
    return tmp_path


def method(row: str, arena: Path) -> tuple[share_arena.Method, dict[str, Any]]:
    exam = share_arena.read_exam(arena, "small")
    recipe = "none" if row in ("full", "no-context") else row
    engine = with_settings(tuned_engine(), recipe=recipe)
    made = share_arena.Method()
    made.setup("tiny", {"exam": exam, "row": row, "engine": engine})
    return made, exam


def result(row: str, arena: Path) -> dict[str, Any]:
    made, exam = method(row, arena)
    return share_arena.answer_all(made, "tiny", exam, QUESTIONS)


def test_sources_are_adjacent_in_the_prompt(arena: Path) -> None:
    made, exam = method("none", arena)
    caches = [made.build_cache(text) for text in SOURCES]
    prompt = made._prompt("How tall?", caches, exam)
    assert prompt.text == (
        "<|begin|><|system|>\nBe brief.<|end|>\n<|user|>\nRead this.\n"
        "Halden Tower is 214 metres tall. Lake Gulnock covers 310 hectares. "
        "\n\nAsked: How tall?\nAnswer:<|end|>\n<|assistant|>\n"
    )
    assert [block.text for block in prompt.context[1:]] == SOURCES


def test_sources_are_encoded_before_the_question_is_known(arena: Path) -> None:
    made, exam = method("none", arena)
    blocks = [made.build_cache(text) for text in SOURCES]
    assert all(made.engine.contains(block) for block in blocks)
    answer = made.answer("How tall?", blocks, {"exam": exam})
    assert answer.aux["misses"] == 0


@pytest.mark.parametrize(
    ("row", "share"), [("none", 0.0), ("head:4", 0.0), ("head+recompute:0.5", 0.5), ("full", 1.0)]
)
def test_costs_count_the_computed_tokens_of_sources(arena: Path, row: str, share: float) -> None:
    made, exam = method(row, arena)
    blocks = [made.build_cache(text) for text in SOURCES]
    answer = made.answer("How tall?", blocks, {"exam": exam})
    tokens = sum(map(len, SOURCES))  # the tiny tokenizer has one token per byte
    assert answer.dense_payload_layer_tokens == 3 * tokens
    assert answer.kv_bytes == tokens * 3 * 2 * 2 * 8 * 4  # layers, K and V, heads, size, float32
    assert answer.recomputed_layer_tokens == pytest.approx(share * 3 * tokens, abs=3)
    assert answer.ttft_ms > 0


def test_the_row_without_sources_has_none_in_the_prompt(arena: Path) -> None:
    made, exam = method("no-context", arena)
    answers = [
        made.answer("How tall?", [made.build_cache(text) for text in texts], {"exam": exam})
        for texts in (SOURCES, ["Something else."])
    ]
    assert answers[0].text == answers[1].text
    assert answers[0].kv_bytes == answers[0].dense_payload_layer_tokens == 0


def test_results_have_the_fields_that_the_leaderboard_requires(arena: Path) -> None:
    found = json.loads(json.dumps(result("none", arena)))
    assert found["schema"] == "kva.result.v1"
    assert found["summary"].keys() >= SUMMARY
    assert found["summary"]["n"] == len(found["results"]) == 3
    assert found["method_card"].keys() >= CARD
    assert found["method_card"]["provenance"] in {"official", "port", "reference"}
    for row, question in zip(found["results"], QUESTIONS, strict=True):
        assert row.keys() >= ITEM
        assert (row["_id"], row["golds"]) == (question["_id"], question["answers"])
        assert all(row[name] >= 0 for name in COSTS)


def scored(values: dict[str, list[float]], ttft: float = 1.0) -> dict[str, Any]:
    """Return a result of one row whose answers have these F1 scores."""
    ((row, scores),) = values.items()
    costs = {"recomputed_layer_tokens": 25, "dense_payload_layer_tokens": 100, "ttft_ms": ttft}
    items = [{"_id": i, "f1_raw": score, **costs} for i, score in enumerate(scores)]
    return {"summary": {"method": f"block-attention ({row})"}, "results": items}


def test_recovered_gain_is_the_share_of_the_gain_from_sources() -> None:
    none, full = scored({"no-context": [0.0, 0.2]}), scored({"full": [1.0, 0.6]}, ttft=4.0)
    line = share_arena.compared(scored({"fast": [0.5, 0.4]}), none, full)
    assert line.startswith("| block-attention (fast) | 2 | 0.450 | +0.50 (")
    assert line.endswith("| 75.0% | 75.0% |")
    worse = share_arena.compared(scored({"none": [0.0, 0.0]}), none, full)
    assert "| -0.14 (" in worse  # worse than no sources: (0 - 0.1) / (0.8 - 0.1)
    useless = share_arena.compared(scored({"none": [0.0, 0.0]}), none, copy.deepcopy(none))
    assert "| undefined |" in useless


def test_results_of_other_questions_are_not_compared() -> None:
    none, full = scored({"no-context": [0.0]}), scored({"full": [1.0, 1.0]})
    with pytest.raises(ValueError, match="different questions"):
        share_arena.compared(full, none, full)


def test_changed_questions_and_unknown_sets_are_refused(arena: Path) -> None:
    with (arena / "data/queryset/small_n100.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(ValueError, match="clone it again"):
        share_arena.read_questions(arena, "small")
    with pytest.raises(ValueError, match="expected one of small"):
        share_arena.read_exam(arena, "large")


def test_the_commands_write_and_score_results(arena: Path) -> None:
    files = []
    for row in ("no-context", "full", "none"):
        path = arena / f"runs/{row}.json"
        command = ["run", str(arena), "small", "--model", "bundled", "--row", row]
        done = CliRunner().invoke(share_arena.app, [*command, "--output", str(path)])
        assert done.exit_code == 0, done.output
        files.append(str(path))
    table = CliRunner().invoke(share_arena.app, ["score", *files]).output.splitlines()
    assert [line.split("|")[1].strip() for line in table[2:]] == [
        f"block-attention ({row})" for row in ("no-context", "full", "none")
    ]
    assert CliRunner().invoke(share_arena.app, ["score", *files[1:]]).exit_code == 2
