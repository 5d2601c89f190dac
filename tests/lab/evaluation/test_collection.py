"""Evaluation of a collection: the values of each row, and the recommended recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.lab.evaluation.accuracy import make_prompt
from blockattn_rag.lab.evaluation.collection import (
    Asked,
    CollectionReport,
    CollectionRow,
    evaluate_collection,
)
from blockattn_rag.lab.evaluation.datasets import EvaluationSample, read_samples
from blockattn_rag.lab.evaluation.fidelity import measure_fidelity
from blockattn_rag.lab.evaluation.metrics import Interval
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.formats import CHAT
from tests.lab.evaluation.samples import record, write_jsonl
from tests.models import shared_tiny_llama, tiny_tokenizer

NEW = 4


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return BlockModel(shared_tiny_llama(), tiny_tokenizer(), name="tiny")


@pytest.fixture
def samples(tmp_path: Path) -> list[EvaluationSample]:
    return read_samples(write_jsonl(tmp_path / "d.jsonl", map(record, range(1, 4))))


def asked_of(engine: BlockAttentionEngine, samples: list[EvaluationSample]) -> list[Asked]:
    """Return the questions of samples, with the answers of full mode as the expected ones."""
    found = []
    for one in samples:
        prompt = make_prompt(engine, CHAT, one)
        text = engine.generate(prompt, mode="full", max_new_tokens=NEW).text
        found.append(Asked(one.id, one.question, prompt, (text,)))
    return found


def test_rows_compare_a_recipe_and_fast_with_full_mode(
    model: BlockModel, samples: list[EvaluationSample]
) -> None:
    engine = BlockAttentionEngine(model, recipe="head:4+recompute:1", resident_bytes=0)
    ticks: list[tuple[int, int]] = []
    report = evaluate_collection(
        engine, asked_of(engine, samples), max_new_tokens=NEW,
        on_progress=lambda *tick: ticks.append(tick),
    )  # fmt: skip
    assert ticks == [(done, 3) for done in range(4)]
    full, exact, fast, bare = report.rows
    assert [row.name for row in report.rows] == [
        "full", "head:4+recompute:1", "fast", "closed-book",
    ]  # fmt: skip
    assert (full.right, full.kept, report.with_answers) == (3, 3, 3)
    # Block mode equals full mode if all tokens are recomputed.
    assert exact.agreement == Interval(1, 1, 1)
    assert exact.kl is not None
    assert exact.kl.mean < 1e-6
    assert (exact.right, report.gain(exact)) == (3, 1)
    expected = measure_fidelity(engine, samples, ["fast"], max_new_tokens=NEW)["fast"]
    assert fast.kl is not None
    assert fast.kl.mean == pytest.approx(expected.kl.mean, rel=1e-4)
    assert fast.agreement == expected.agreement
    assert (bare.kl, bare.ttft_s, report.gain(bare)) == (None, None, None)
    assert all(row.ttft_s for row in (full, exact, fast))


def test_without_expected_answers_accuracy_is_not_reported(
    model: BlockModel, samples: list[EvaluationSample]
) -> None:
    engine = BlockAttentionEngine(model, recipe="head:4", resident_bytes=0)
    asked = [Asked(s.id, s.question, make_prompt(engine, CHAT, s)) for s in samples]
    report = evaluate_collection(engine, asked, max_new_tokens=NEW)
    # The recipe of the engine equals "fast", so it has no row of its own.
    assert [row.name for row in report.rows] == ["full", "fast"]
    assert [row.right for row in report.rows] == [None, None]
    assert report.with_answers == 0


@pytest.mark.parametrize("text", ["recompute:0.1", "head:4+promote:1+recompute:0.1"])
def test_the_store_only_receives_blocks_of_its_own_recipe(
    model: BlockModel, samples: list[EvaluationSample], text: str
) -> None:
    engine = BlockAttentionEngine(model, recipe=text)
    asked = asked_of(engine, samples)
    report = evaluate_collection(engine, asked, max_new_tokens=NEW)
    assert [row.name for row in report.recipes] == [text, "fast"]
    blocks = {(not at, one.handle) for a in asked for at, one in enumerate(a.prompt.context)}
    assert len(list(engine.store.keys())) == len(blocks)


def report_of(**shares: float) -> CollectionReport:
    rows = [
        CollectionRow(name, agreement=Interval(share, share, share), ttft_s=0.5)
        for name, share in shares.items()
    ]
    return CollectionReport(40, 0, (CollectionRow("full", ttft_s=2.0), *rows))


@pytest.mark.parametrize(
    ("costly", "fast", "expected"),
    [(0.99, 0.96, "fast"), (0.97, 0.94, "costly"), (0.90, 0.80, None)],
)
def test_the_cheapest_recipe_within_the_tolerance_is_recommended(
    costly: float, fast: float, expected: str | None
) -> None:
    report = report_of(costly=costly, fast=fast)
    assert (report.best and report.best.name) == expected
    assert report.sooner(report["fast"]) == 4


def test_accuracy_decides_if_expected_answers_are_known() -> None:
    near = Interval(0.99, 0.99, 0.99)
    rows = (
        CollectionRow("full", right=20, kept=20, ttft_s=1.0),
        CollectionRow("costly", near, near, right=21, kept=19, ttft_s=0.5),
        CollectionRow("fast", near, near, right=20, kept=15, ttft_s=0.1),
        CollectionRow("closed-book", right=10, kept=8),
    )
    report = CollectionReport(40, 40, rows)
    assert [report.share(row) for row in report.recipes] == [0.95, 0.75]
    assert report.best is rows[1]
    assert [report.gain(row) for row in rows] == [1.0, 1.1, 1.0, None]
    found = report.to_dict()
    assert (found["best"], found["rows"][2]["gain"]) == ("costly", 1.0)
