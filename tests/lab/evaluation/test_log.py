"""Replay of logged prompts in full mode and in block mode."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError
from blockattn_rag.lab.evaluation.fidelity import measure_fidelity, read_log
from tests.engines import tuned_engine

PROMPTS = [["You answer.\n", f"Tower {n} is {n}00 metres high.\n", f"How high is {n}?"]
           for n in range(1, 4)]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return tuned_engine()


def write(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_compares_along_the_full_answer(engine: BlockAttentionEngine, tmp_path: Path) -> None:
    log = read_log(write(tmp_path / "log.jsonl", *({"prompt": one} for one in PROMPTS)))
    report = measure_fidelity(engine, log, ("none", "head:4"), max_new_tokens=4)
    assert [row.mode for row in report.results] == ["floor", "none", "head:4"]
    for prompt, record in zip(PROMPTS, report.records[3:6], strict=True):
        full = engine.generate(prompt, mode="full", max_new_tokens=4)
        block = engine.answer_logits(prompt, full.token_ids, recipe="none").argmax(-1)
        agreement = (block.tolist()[i] == token for i, token in enumerate(full.token_ids))
        assert record.agreement == pytest.approx(sum(agreement) / len(full.token_ids))
    assert report["floor"].identical.mean == 1
    assert report["none"].kl.mean > 1e-4


def test_ids_are_read_from_the_log_or_are_line_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "log", {"prompt": ["a", "b"], "id": "x"}, {"prompt": ["c"]})
    log = read_log(path)
    assert [(one.id, one.texts) for one in log] == [("x", ("a", "b")), ("2", ("c",))]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "is empty: expected one JSON object per line"),
        ([{"blocks": ["a"]}], "line 1: Missing key 'prompt', found 'blocks'"),
        ([{"prompt": ["a", " "]}], r"line 1: Found an empty 'prompt\[1\]'"),
        ([{"prompt": ["a"], "id": 1}, {"prompt": ["b"], "id": "1"}], "line 2: duplicate id '1'"),
    ],
)
def test_reports_invalid_lines(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_log(write(tmp_path / "log.jsonl", *records))
