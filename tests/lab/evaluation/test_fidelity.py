"""Fidelity: comparison with the oracle, modes, record files and invalid input."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from blockattn_rag.check.oracle import oracle_logits
from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.errors import ContextOverflowError, DataError
from blockattn_rag.lab.evaluation import fidelity
from blockattn_rag.lab.evaluation.accuracy import make_prompt
from blockattn_rag.lab.evaluation.datasets import EvaluationSample, read_samples
from blockattn_rag.lab.evaluation.fidelity import FidelityReport, measure_fidelity, read_log
from blockattn_rag.prompts import CHAT
from blockattn_rag.prompts.sinks import sink_ids
from tests.engines import tuned_engine
from tests.lab.evaluation.samples import record, write_jsonl
from tests.recording import recorded

NEW = 4
PROMPTS = [["You answer.\n", f"Tower {n} is {n}00 metres high.\n", f"How high is {n}?"]
           for n in range(1, 4)]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return tuned_engine()


@pytest.fixture
def samples(tmp_path: Path) -> list[EvaluationSample]:
    return read_samples(write_jsonl(tmp_path / "d.jsonl", map(record, range(1, 4))))


Measure = Callable[..., FidelityReport]


@pytest.fixture
def measure(engine: BlockAttentionEngine, samples: list[EvaluationSample]) -> Measure:
    """Function that measures recipes with ``engine`` and ``samples``, unless others are given."""

    def run(*recipes: str, **options: Any) -> FidelityReport:
        given: dict[str, Any] = {"engine": engine, "samples": samples, **options}
        return measure_fidelity(recipes=recipes, max_new_tokens=NEW, **given)

    return run


@pytest.mark.parametrize("sink", ["none", "head:4"])
def test_divergence_and_agreement_equal_the_oracle(
    engine: BlockAttentionEngine, samples: list[EvaluationSample], measure: Measure, sink: str
) -> None:
    model = engine.model
    report = measure(sink)
    for sample, found in zip(samples, report.records[len(samples) :], strict=True):
        prompt = make_prompt(engine, CHAT, sample)
        ids = model.tokenizer.prompt_ids(prompt)
        answer = engine.generate(prompt, mode="full", max_new_tokens=NEW).token_ids
        final = [*ids.final, *answer[:-1]]
        full, block = (
            torch.log_softmax(oracle_logits(model.hf_model, blocks, before)[-len(answer) :], -1)
            for blocks, before in (
                ([[*ids.flat, *answer[:-1]]], ()),
                ([*ids.context, final], sink_ids(sink, model.tokenizer)),
            )
        )
        kl = (full.exp() * (full - block)).sum(-1)
        # Logits may differ from the oracle's by 1e-4, which changes KL by up to 2e-4.
        assert found.kl == pytest.approx(float(kl.mean()), rel=1e-3, abs=2e-4)
        assert found.first_kl == pytest.approx(float(kl[0]), rel=1e-3, abs=2e-4)
        same = (block.argmax(-1) == torch.tensor(answer)).float()
        assert found.agreement == float(same.mean())
        assert found.tokens == len(answer)


def test_the_floor_only_contains_rounding_errors(measure: Measure) -> None:
    report = measure("none", "head:4", closed_book=True)
    assert [row.mode for row in report.results] == ["floor", "none", "head:4", "closed-book"]
    assert report["floor"].kl.high < 1e-8
    assert (report["floor"].agreement.mean, report["floor"].identical.mean) == (1, 1)
    assert report["none"].kl.low > 1e-3
    assert report["none"].recovery is None
    difference = report["none"].kl.mean - report["head:4"].kl.mean
    recovered = report["head:4"].recovery
    assert recovered is not None
    assert recovered.mean == pytest.approx(difference / report["none"].kl.mean, rel=1e-4)
    row = report.to_dict()["rows"][2]
    assert set(row["recovery"]) == set(row["kl"]) == {"mean", "low", "high"}


def test_modes_without_passages_are_equal(
    measure: Measure, samples: list[EvaluationSample]
) -> None:
    bare = [replace(sample, passages=()) for sample in samples]
    report = measure("none", "head:4", samples=bare)
    assert [row.recovery for row in report.results] == [None] * 3
    assert report["head:4"].kl.high < 1e-8


def test_the_recipe_of_the_engine_is_ignored(
    engine: BlockAttentionEngine, measure: Measure
) -> None:
    sunk = BlockAttentionEngine(engine.model, recipe="head:4")
    recipes = ("none", "head:4")
    assert measure(*recipes, engine=sunk).records == measure(*recipes).records


def test_int8_engines_are_measured_with_their_rounding(
    engine: BlockAttentionEngine, measure: Measure
) -> None:
    half = BlockAttentionEngine(engine.model, recipe="none", kv_dtype="int8")
    plain, rounded = (measure("none", engine=one) for one in (engine, half))
    difference = abs(plain["none"].kl.mean - rounded["none"].kl.mean)
    assert 0 < difference < 0.1 * plain["none"].kl.mean
    assert rounded.settings["kv_dtype"] == "int8"


def test_recovery_needs_a_measurement_of_plain_block_mode(measure: Measure) -> None:
    assert measure("bos")["bos"].recovery is None


def test_an_interrupted_comparison_resumes(
    measure: Measure,
    samples: list[EvaluationSample],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = measure("none")
    path = tmp_path / "records.jsonl"

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure("none", records_path=path, on_progress=stop)
    asked = recorded(monkeypatch, fidelity, "full_answer")
    resumed = measure("none", records_path=path)
    assert len(asked) == 1
    assert resumed.records == expected.records
    more = measure("none", "bos", records_path=path)
    assert len(asked) == 4  # only the new recipe is run, against the recorded answers of full mode
    assert more.records[: len(resumed.records)] == resumed.records
    with pytest.raises(DataError, match="other settings"):
        measure("none", records_path=path, settings={"data": "other"})
    changed = [EvaluationSample("q1", "Another question?", (), samples[0].passages)]
    with pytest.raises(DataError, match="other questions"):
        measure("none", samples=changed, records_path=path)


def test_records_of_a_different_recipe_with_the_same_name_are_refused(
    measure: Measure, tmp_path: Path
) -> None:
    path, folder = tmp_path / "records.jsonl", tmp_path / "recipe"
    Recipe("bos").save(folder)
    measure("none", str(folder), records_path=path)
    measure(str(folder), records_path=path)
    Recipe("head:4").save(folder)
    with pytest.raises(DataError, match="with another recipe"):
        measure(str(folder), records_path=path)
    measure("none", records_path=path)


def test_empty_runs_are_refused(measure: Measure) -> None:
    for recipes in (("none", "none"), ("full",), ("closed-book", "none")):
        with pytest.raises(ValueError, match="expected distinct names other than 'full'"):
            measure(*recipes)
    for recipe in ("blocks", "sink=head:4"):
        with pytest.raises(ValueError, match="Found no recipe at"):
            measure(recipe)
    with pytest.raises(ValueError, match="at least one sample"):
        measure("none", samples=[])


def test_an_answer_that_exceeds_the_context_window_is_refused(engine: BlockAttentionEngine) -> None:
    room = engine.model.max_context_tokens
    with pytest.raises(ContextOverflowError, match="there is room for 2 of 3 answer tokens"):
        engine.answer_logits(["a", "b" * (room - 4)], [1, 2, 3])
    with pytest.raises(ValueError, match="answer_ids is empty"):
        engine.answer_logits(["a", "b"], [])


def test_logged_prompts_are_compared_along_the_full_answer(
    engine: BlockAttentionEngine, tmp_path: Path
) -> None:
    log = read_log(write_jsonl(tmp_path / "log.jsonl", ({"prompt": one} for one in PROMPTS)))
    report = measure_fidelity(engine, log, ("none", "head:4"), max_new_tokens=4)
    assert [row.mode for row in report.results] == ["floor", "none", "head:4"]
    with pytest.raises(ValueError, match="logged prompts; expected evaluation data"):
        measure_fidelity(engine, log, closed_book=True)
    for prompt, found in zip(PROMPTS, report.records[3:6], strict=True):
        full = engine.generate(prompt, mode="full", max_new_tokens=4)
        block = engine.answer_logits(prompt, full.token_ids, recipe="none").argmax(-1)
        agreement = (block.tolist()[i] == token for i, token in enumerate(full.token_ids))
        assert found.agreement == pytest.approx(sum(agreement) / len(full.token_ids))
    assert report["floor"].identical.mean == 1
    assert report["none"].kl.mean > 1e-4


def test_ids_are_read_from_the_log_or_are_line_numbers(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "log", [{"prompt": ["a", "b"], "id": "x"}, {"prompt": ["c"]}])
    log = read_log(path)
    assert [(one.id, one.texts) for one in log] == [("x", ("a", "b")), ("2", ("c",))]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "is empty: expected one JSON object per line"),
        ([{"blocks": ["a"]}], "line 1: Missing key 'prompt', found 'blocks'"),
        ([{"prompt": ["a", " "]}], r"line 1: Found an empty 'prompt\[1\]'"),
        ([{"prompt": ["a"], "id": 1}, {"prompt": ["b"], "id": "1"}], "Found a duplicate id"),
    ],
)
def test_invalid_lines_of_a_log_are_reported(
    tmp_path: Path, records: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_log(write_jsonl(tmp_path / "log.jsonl", records))
