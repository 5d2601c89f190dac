"""Statistics of answers."""

from __future__ import annotations

import time

import pytest

from blockattn_rag.engine.results import Clock, ReuseStats


def test_statistics_are_consistent() -> None:
    stats = ReuseStats("block", hits=2, misses=1, reused_tokens=30, computed_tokens=12)
    assert stats.prompt_tokens == 42
    clock = Clock(began := time.perf_counter() - 10)
    clock.assembling, clock.prefilling, clock.first_token = began + 1, began + 3, began + 7
    done = clock.complete(stats, 5)
    assert (done.assemble_s, done.prefill_s, done.ttft_s) == pytest.approx((2.0, 4.0, 7.0))
    assert (done.generated_tokens, done.hits) == (5, 2)
    assert done.total_s > done.ttft_s


def test_statistics_of_several_requests_add_up() -> None:
    first = ReuseStats("block", 2, 1, 30, 12, ttft_s=0.5, total_s=1.0)
    second = ReuseStats("full", 1, 0, 10, 3, ttft_s=0.25, total_s=0.5)
    both = sum([first, second], ReuseStats("block"))
    assert both == ReuseStats("block", 3, 1, 40, 15, ttft_s=0.75, total_s=1.5)
    assert both.reuse() == {"hits": 3, "misses": 1, "reused_tokens": 40, "computed_tokens": 15}
