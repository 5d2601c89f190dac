from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockattn_rag.engine import BlockAttentionEngine, Generation, Recipe, ReuseStats
from blockattn_rag.engine.find_recipe import RecipeLike
from blockattn_rag.errors import ContextOverflowError, DataError
from blockattn_rag.lab.evaluation.accuracy import EvaluationRecord, evaluate, make_prompt
from blockattn_rag.lab.evaluation.datasets import EvaluationSample, read_samples
from blockattn_rag.lab.evaluation.records import RecordFile
from blockattn_rag.prompts import BlockPrompt, prompt_format
from tests.engines import tuned_engine, tuned_model
from tests.lab.evaluation.samples import record, write_jsonl

LINES = """\
{"settings": {"model": "m", "limit": null}}
{"id": "q1", "digest": "00ff", "mode": "head:4", "question": "How high?", \
"answers": ["á", "b"], "output": "It is.", "accuracy": 1.0, "exact_match": 0.0, "f1": 0.5, \
"hits": 3, "misses": 1, "reused_tokens": 30, "computed_tokens": 12, \
"generated_tokens": 4, "finish_reason": "length", "recipe": "0a"}
"""
RECORD = EvaluationRecord(
    "q1", "00ff", "head:4", "How high?", ("á", "b"), "It is.",
    accuracy=1.0, exact_match=0.0, f1=0.5, hits=3, misses=1, reused_tokens=30,
    computed_tokens=12, generated_tokens=4, finish_reason="length", recipe="0a",
)  # fmt: skip


class FakeEngine:
    """Engine that returns prepared answers by mode, and records its prompts."""

    kv_dtype = "model"

    def __init__(self, answers: dict[str, dict[str, str]], fail_after: int = 1000) -> None:
        self.answers = answers
        self.fail_after = fail_after
        self.asked: list[tuple[str, BlockPrompt]] = []
        self.encoded = 0
        tokenizer = SimpleNamespace(
            tokenizer=SimpleNamespace(chat_template=None), prompt_ids=lambda _: ([[1]], [2])
        )
        self.model = SimpleNamespace(
            name="fake", fingerprint="f" * 64, tokenizer=tokenizer, max_context_tokens=3,
            checkpoint=None, tuned_with={},
        )  # fmt: skip
        self.store = None

    def precompute(self, blocks: Sequence[Any], *, as_prompt: bool, **_: Any) -> None:
        assert as_prompt
        self.encoded += len(blocks)

    def generate_batch(
        self, prompts: Sequence[BlockPrompt], *, mode: str, recipe: Recipe | None = None, **_: Any
    ) -> list[Generation]:
        self.fail_after -= 1
        if self.fail_after < 0:
            raise KeyboardInterrupt
        name = "composite" if recipe and recipe.positions == "composite" else mode
        if not any(prompt.context for prompt in prompts):
            name = "closed-book"
        self.asked += [(name, prompt) for prompt in prompts]
        stats = ReuseStats(mode="block", hits=3, reused_tokens=30, computed_tokens=10)
        return [Generation(self._answer(name, p), [1], "stop", stats) for p in prompts]

    def _answer(self, name: str, prompt: BlockPrompt) -> str:
        table = self.answers.get(name, {})
        return next((a for q, a in table.items() if f"Tower {q}?" in prompt.final), "no idea")


def samples(tmp_path: Path, count: int = 4) -> list[EvaluationSample]:
    return read_samples(write_jsonl(tmp_path / "d.jsonl", [record(i) for i in range(1, count + 1)]))


def run(engine: FakeEngine, *args: Any, **options: Any) -> Any:
    as_engine: Any = engine
    return evaluate(as_engine, *args, **options)


def test_recipes_are_scored_and_compared_with_full_mode(tmp_path: Path) -> None:
    right = {str(i): f"It is {i}00 metres." for i in range(1, 5)}
    engine = FakeEngine(
        {"full": right, "block": {**right, "2": "?"}, "closed-book": {"1": "100 metres"}}
    )
    recipes = {"none": Recipe(), "composite": Recipe(positions="composite")}
    report = run(engine, samples(tmp_path), recipes, closed_book=True, batch_size=3)
    assert [r.mode for r in report.results] == ["full", "none", "composite", "closed-book"]
    assert [r.accuracy.mean for r in report.results] == [1.0, 0.75, 0.0, 0.25]
    assert [r.agreement for r in report.results] == [1.0, 0.75, 0.0, 0.0]
    assert report["none"].difference.mean == -0.25
    assert report["none"].stats.reused_tokens == 120
    assert report["closed-book"].exact_match.mean == 0.25
    assert report["none"].cut_off == 0
    assert json.loads(json.dumps(report.to_dict()))["rows"][1]["accuracy"]["mean"] == 0.75


def test_an_interrupted_evaluation_resumes_from_its_records(tmp_path: Path) -> None:
    path, data = tmp_path / "out" / "records.jsonl", samples(tmp_path)
    engine = FakeEngine({"full": {"1": "100 metres"}}, fail_after=3)
    with pytest.raises(KeyboardInterrupt):
        run(engine, data, ("none",), batch_size=2, records_path=path)
    # A run killed while writing leaves an incomplete line.
    path.write_bytes(path.read_bytes() + b'{"id": "q4", "mo')
    again = FakeEngine({})
    report = run(again, data, ("none",), batch_size=2, records_path=path)
    assert len(again.asked) == 2
    assert report["full"].accuracy.mean == 0.25
    assert report["none"].samples == 4
    # One line of settings and eight records.
    assert len(path.read_text(encoding="utf-8").splitlines()) == 9
    nothing = FakeEngine({})
    assert run(nothing, data, ("none",), batch_size=2, records_path=path) == report
    assert not nothing.asked


@pytest.mark.parametrize(
    "text",
    ["what is this\n", "my only notes, no newline", '{"id": 1}\n{"id": 2}', "[1, 2]", '{"set up'],
)
def test_a_file_without_records_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path, data = tmp_path / "records.jsonl", samples(tmp_path, 1)
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="line 1: not a record file"):
        run(FakeEngine({}), data, (), records_path=path)
    assert path.read_text(encoding="utf-8") == text


def test_a_run_killed_while_writing_its_settings_starts_again(tmp_path: Path) -> None:
    path, data = tmp_path / "records.jsonl", samples(tmp_path, 1)
    run(FakeEngine({}), data, (), records_path=path)
    whole = path.read_bytes()
    for length in (0, 9, whole.index(b"\n")):
        path.write_bytes(whole[:length])
        run(FakeEngine({}), data, (), records_path=path)
        assert path.read_bytes() == whole


@pytest.mark.parametrize("key", ["question", "answers", "passages"])
def test_records_of_other_samples_with_the_same_ids_are_refused(tmp_path: Path, key: str) -> None:
    path, data = tmp_path / "records.jsonl", samples(tmp_path, 3)
    run(FakeEngine({}), data[:2], (), records_path=path)
    kept = path.read_bytes()
    changed = [data[0], replace(data[1], **{key: getattr(data[2], key)}), data[2]]
    for recipes in ((), ("none",)):
        with pytest.raises(DataError, match="or passages under the ids q2"):
            run(FakeEngine({}), changed, recipes, records_path=path)
    assert path.read_bytes() == kept


def test_invalid_arguments_are_refused_before_anything_runs(tmp_path: Path) -> None:
    engine = FakeEngine({})
    with pytest.raises(ValueError, match="Invalid batch_size 0: expected 1"):
        run(engine, samples(tmp_path, 1), batch_size=0)
    with pytest.raises(ValueError, match="at least one sample"):
        run(engine, [])
    assert not engine.asked


def test_batches_of_a_real_engine_reuse_blocks_without_changing_answers(tmp_path: Path) -> None:
    engine = tuned_engine()
    data = samples(tmp_path, 3)
    recipes: dict[str, RecipeLike] = {
        "none": "none",
        "composite": Recipe(positions="composite"),
        "head:4": "head:4",
    }
    batched = evaluate(engine, data, recipes, max_new_tokens=4, batch_size=3)
    single = evaluate(engine, data, recipes, max_new_tokens=4, batch_size=1)
    assert [r.output for r in batched.records] == [r.output for r in single.records]
    assert single["full"].stats.reused_tokens == 0
    assert [single[name].stats.misses for name in recipes] == [0, 0, 0]
    assert single["none"].stats.reused_tokens > 0


def test_samples_that_exceed_the_context_window_are_reported(tmp_path: Path) -> None:
    engine = tuned_engine()
    long = record(2)
    long["passages"][0]["text"] = "A lake is deep. " * 2_000
    data = read_samples(write_jsonl(tmp_path / "d.jsonl", [record(1), long, record(3)]))
    path = tmp_path / "records.jsonl"
    with pytest.raises(ContextOverflowError, match="1 of 3 prompts do not fit") as raised:
        evaluate(engine, data, (), max_new_tokens=4, batch_size=3, records_path=path)
    assert "the ids q2, up to" in str(raised.value)
    assert not path.exists()
    short = [sample.with_passages(1) for sample in data]
    evaluate(engine, short, (), max_new_tokens=1, records_path=path)


def test_answers_cut_off_by_the_context_window_are_counted(tmp_path: Path) -> None:
    # The window is also too small for the repetition guard.
    engine = BlockAttentionEngine(tuned_model(max_position_embeddings=720))
    data = samples(tmp_path, 2)
    prompt = make_prompt(engine, prompt_format("chat"), data[0])
    context, final = engine.model.tokenizer.prompt_ids(prompt)
    room = engine.model.max_context_tokens - sum(map(len, context)) - len(final)
    report = evaluate(engine, data, (), max_new_tokens=room + 50)
    assert [r.generated_tokens for r in report.records] == [room, room]
    assert report["full"].cut_off == 2


def test_records_survive_a_round_trip(tmp_path: Path) -> None:
    settings = {"model": "m", "limit": None}
    path, parse = tmp_path / "new.jsonl", EvaluationRecord.from_dict
    RecordFile(path, settings, parse).append([RECORD])
    assert path.read_text("utf-8") == LINES
    assert RecordFile(path, settings, parse).records == {("q1", "head:4"): RECORD}
    for damaged in ("[1]", "{"):
        path.write_text(f"{LINES}{damaged}\n", "utf-8")
        with pytest.raises(DataError, match=r"line 3: not a record \(.*; choose another file"):
            RecordFile(path, settings, parse)
