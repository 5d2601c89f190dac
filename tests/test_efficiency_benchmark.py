"""The benchmarks of shared prompts and of encoding, and the plots of results."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.model.repetition import TEXT_TOKENS
from tests.lab.efficiency.engines import repeating_engine, tiny_engine

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from efficiency import columns, measure_ingest, measure_shared, sharing_prompts
from plot import plot


def test_requests_share_the_system_block_and_nothing_else() -> None:
    prompts = sharing_prompts(tiny_engine(), 3, system=20, context=8, question=4)
    assert len({prompt.context[0] for prompt in prompts}) == 1
    assert len({prompt.context[1] for prompt in prompts}) == 3
    assert [len(block.text.split()) for block in prompts[0].context] == [20, 8]


def test_shared_rows_hold_rates_gains_and_the_bound() -> None:
    rows = measure_shared(
        tiny_engine(),
        [1, 4],
        system_tokens=[32],
        context_tokens=8,
        question_tokens=4,
        new_tokens=3,
        repeats=1,
    )
    assert [(row["system_tokens"], row["batch"]) for row in rows] == [(32, 1), (32, 4)]
    for row in rows:
        assert row["gain"] == row["shared_tokens_per_s"] / row["unshared_tokens_per_s"]
        assert row["decode_gain"] > 0
    # 4 requests of 32 + 8 tokens: 160 read apart, 32 + 4 * 8 = 64 together.
    assert [row["bytes_ratio"] for row in rows] == [1.0, 2.5]
    assert columns("shared", rows)["equation 10"] == ["1.0", "2.5"]


def test_a_model_that_cannot_share_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine()
    monkeypatch.setattr(type(engine.model), "supports_relay", False)
    with pytest.raises(ValueError, match="cannot share blocks"):
        measure_shared(engine, [2])


def test_answers_that_end_early_are_an_error() -> None:
    engine = tiny_engine()
    engine.model.hf_model.generation_config.eos_token_id = list(range(512))
    with pytest.raises(ValueError, match="ended after 1 of 4 tokens"):
        measure_shared(engine, [2], system_tokens=[16], context_tokens=8, new_tokens=4, repeats=1)


def test_answers_that_repeat_themselves_are_measured_in_full() -> None:
    sizes: dict[str, Any] = {"system_tokens": [16], "context_tokens": 8, "question_tokens": 4}
    new_tokens = TEXT_TOKENS + 2
    (row,) = measure_shared(repeating_engine(), [2], **sizes, new_tokens=new_tokens, repeats=1)
    assert row["gain"] > 0


def test_every_block_size_has_a_row_with_both_rates() -> None:
    model = tiny_engine().model
    rows = measure_ingest(model, [4, 16], total_tokens=64, repeats=1)
    assert [row["block_tokens"] for row in rows] == [4, 16]
    for row in rows:
        ratio = row["encode_tokens_per_s"] / row["plain_tokens_per_s"]
        assert row["encode_over_plain"] == ratio
        # Two layers, keys and values, two heads of eight, four bytes each.
        assert row["bytes_per_token"] == 2 * 2 * 2 * 8 * 4


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        measure_ingest(tiny_engine().model, [0])


def test_a_plot_names_the_paths_that_the_rows_hold(tmp_path: Path) -> None:
    rows = [
        {"length": length, "block_tokens": size, "full_s": 2.0 * length, "relay_s": 1.0 * size}
        for length in (512, 1024)
        for size in (128, 512)
    ]
    file = tmp_path / "plot.svg"
    plot("decode", rows, file)
    drawn = file.read_text("utf-8")
    assert "full prefill, 128 tokens of a block" in drawn
    assert "blocks, relay, 512 tokens of a block" in drawn
    assert "blocks, copied" not in drawn
    assert "tokens of context" in drawn
