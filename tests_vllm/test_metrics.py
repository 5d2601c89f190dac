"""Prometheus metrics of loads."""

from __future__ import annotations

from blockattn_rag.server.vllm.metrics import Counters
from blockattn_rag.store import TierStats


def test_loads_are_counted_by_tier() -> None:
    names = ("memory", "disk", "cache", "home")
    before = [TierStats(name, hits=place) for place, name in enumerate(names)]
    now = [TierStats(name, hits=5, misses=place) for place, name in enumerate(names)]
    counters = Counters()
    counters.count_tiers(before, now, names)
    taken = counters.taken()
    assert taken is not None
    hits = {f"tier_hits/{name}": 5 - place for place, name in enumerate(names)}
    assert taken.data == hits | {f"tier_misses/{name}": n for n, name in enumerate(names) if n}
