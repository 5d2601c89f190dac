"""The benchmark of repairs: its record file, its table, and sparse recomputation."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from typer.testing import CliRunner

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.options import GenerateOptions
from blockattn_rag.evaluation import read_samples
from blockattn_rag.evaluation.run import make_prompt
from blockattn_rag.prompts.formats import CHAT
from tests.engines import tuned_engine
from tests.evaluation.samples import record, write_jsonl

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import stock_models
from sparse_recomputation import recomputed_logits
from stock_models import Row

ANSWER = [65, 66, 67]
# Float32 rounds at 6e-8 of values of about 1; three layers of 32 sums of 64 lose three digits.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return tuned_engine()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", map(record, range(1, 4)))


def recomputed(engine: BlockAttentionEngine, data: Path, first: int, **how: Any) -> Tensor:
    (sample, *_) = read_samples(data)
    prompt = make_prompt(engine, CHAT, sample, "block")
    return recomputed_logits(engine, prompt, ANSWER, GenerateOptions(**how), first)


@pytest.mark.parametrize("first", [1, 5])
def test_recomputed_tokens_attend_to_all_before_them_and_to_nothing_behind(
    engine: BlockAttentionEngine, data: Path, first: int
) -> None:
    """One passage after the other, in plain causal forwards over what stands before it."""
    (sample, *_) = read_samples(data)
    prompt = make_prompt(engine, CHAT, sample, "block")
    prepared = engine._runner.prepare(prompt, GenerateOptions())
    assert prepared.context is not None
    model = engine.model
    stored = model.cache_for(prepared.context)
    assert stored is not None
    ids, cache = prepared.context_ids, DynamicCache()
    head, *passages = prepared.context.blocks

    def keep(start: int, end: int) -> None:
        for index, layer in enumerate(stored.layers):
            keys, values = layer.keys, layer.values  # type: ignore[union-attr]
            cache.update(keys[:, :, start:end], values[:, :, start:end], index)  # type: ignore[index]

    with torch.inference_mode():
        keep(0, head.kv.num_tokens)
        for block in passages:
            end = block.start + block.kv.num_tokens
            until = min(block.start + first, end)
            model.hf_model(torch.tensor([ids[block.start : until]]), past_key_values=cache)
            keep(until, end)
        expected = model.answer_logits(ids, prepared.final_ids, ANSWER, cache)
    assert len(passages) > 1
    found = recomputed(engine, data, first)
    assert torch.allclose(found, expected, atol=TOLERANCE)


def test_all_tokens_recomputed_are_full_attention_and_none_are_block_attention(
    engine: BlockAttentionEngine, data: Path
) -> None:
    (sample, *_) = read_samples(data)
    prompt = make_prompt(engine, CHAT, sample, "block")
    full, block = (engine.answer_logits(prompt, ANSWER, mode=mode) for mode in ("full", "block"))
    assert not torch.allclose(full, block, atol=10 * TOLERANCE)
    assert torch.allclose(recomputed(engine, data, 10_000), full, atol=TOLERANCE)
    assert torch.allclose(recomputed(engine, data, 0), block, atol=TOLERANCE)


ROWS = [
    Row("1", "full", "ab12", 3, 0.0, 0.0, 1.0, 1.0, 0.5),
    Row("1", "block", "ab12", 3, 0.4, 0.2, 0.5, 0.0, 0.25),
    Row("1", "sink=head:4", "ab12", 3, 0.1, 0.1, 0.75),
    Row("2", "full", "ab12", 3, 0.0, 0.0, 1.0, 1.0, 0.5),
    Row("2", "block", "ab12", 3, 0.2, 0.2, 0.5, 1.0, 0.25),
]


def test_records_survive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    stock_models.append_rows(path, ROWS[:3], [])
    path.write_text(path.read_text(encoding="utf-8")[:-4], encoding="utf-8")
    known = stock_models.read_rows(path)
    assert known == ROWS[:2]
    stock_models.append_rows(path, ROWS[2:], known)
    assert stock_models.read_rows(path) == ROWS
    stock_models.append_rows(path, [replace(ROWS[2], id="2")], ROWS)
    assert stock_models.read_rows(path)[5:] == [replace(ROWS[2], id="2")]


def test_the_table_compares_each_mode_over_the_questions_that_both_were_asked(
    tmp_path: Path,
) -> None:
    path = tmp_path / "rows.csv"
    stock_models.append_rows(path, ROWS, [])
    shown = CliRunner().invoke(stock_models.app, ["table", str(path)]).output.splitlines()
    assert "| `block` | 2 | 0.300 (0.200 to 0.400) | 0.200 | 50 % (50 to 50) |  |  |  |" in shown
    assert (
        "| `sink=head:4` | 1 | 0.100 (0.100 to 0.100) | 0.100 | 75 % (75 to 75) | 75 % (75 to 75) "
        "|  |  |" in shown
    )
    scores = "50.0 % (0.0 to 100.0) | -50.0 % (-100.0 to +0.0) | 25.0 % (25.0 to 25.0)"
    assert f"| `block` | 2 | {scores} | -25.0 % (-25.0 to -25.0) |" in shown
    assert not any(line.startswith("| `sink=head:4` | 0") for line in shown)


def test_a_run_adds_what_is_missing_alone(
    engine: BlockAttentionEngine, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_models, "_engine", lambda _: engine)
    asked: list[str] = []
    rows_of = stock_models.Comparison.rows

    def watched(self: Any, mode: str, answers_too: bool) -> list[Row]:
        asked.append(mode)
        return rows_of(self, mode, answers_too)

    monkeypatch.setattr(stock_models.Comparison, "rows", watched)
    output = tmp_path / "rows.csv"
    common = ["measure", "--data", str(data), "--output", str(output), "--batch-size", "2"]
    common += ["--max-new-tokens", "4", "--num-passages", "3"]
    run = CliRunner()
    first = run.invoke(
        stock_models.app, [*common, "--modes", "block", "--answered", "block", "--limit", "2"]
    )
    assert first.exit_code == 0, first.output
    modes = "block,recompute=2,sink=first-block,promote=1,closed-book"
    again = run.invoke(stock_models.app, [*common, "--modes", modes, "--answered", "block"])
    assert again.exit_code == 0, again.output
    assert asked == ["block", *modes.split(",")[1:], *modes.split(",")]
    rows = stock_models.read_rows(output)
    assert len({(row.id, row.mode) for row in rows}) == len(rows) == 3 * 6
    assert {row.mode for row in rows if row.accuracy is not None} == {"full", "block"}


def test_a_run_with_other_files_or_prompts_is_not_added_to(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_models, "_engine", lambda _: pytest.fail("nothing is to be loaded"))
    output = tmp_path / "rows.csv"
    stock_models.append_rows(output, ROWS, [])
    before = output.read_bytes()
    common = ["measure", "--data", str(data), "--output", str(output), "--modes", "block"]
    told = CliRunner().invoke(stock_models.app, common)
    assert told.exit_code == 2
    assert "name another --output" in " ".join(told.output.replace("│", "").split())
    assert output.read_bytes() == before
