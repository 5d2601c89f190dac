"""The benchmarks of shared prompts, encoding and recomputation, and the plots of results."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.lab.efficiency.engines import tiny_engine

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from efficiency import columns, measure_recompute, measure_shared


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


def test_recompute_rows_hold_the_times_of_each_share() -> None:
    rows = measure_recompute(
        tiny_engine(), [32, 48], shares=[0, 0.5], block_tokens=16, question_tokens=4, repeats=1
    )
    assert [row["length"] for row in rows] == [32, 48]
    assert all(ratio > 0 for row in rows for ratio in row["over_full"].values())
    assert list(columns("recompute", rows)) == ["context", "0%", "50%"]
