"""Prometheus metrics of loads."""

from __future__ import annotations

from blockattn_rag.server.loader import LoaderStats
from blockattn_rag.server.vllm.metrics import Counters, count_loads
from blockattn_rag.store import TierStats


def test_loads_are_counted_by_tier() -> None:
    names = ("memory", "disk", "cache", "home")
    before = LoaderStats(tiers=())
    now = LoaderStats(loads=1, tiers=tuple(TierStats(n, hits=at) for at, n in enumerate(names)))
    later = LoaderStats(loads=3, tiers=tuple(TierStats(n, hits=5) for n in names))
    counters = Counters()
    count_loads(counters, before, now, names)
    count_loads(counters, now, later, names)
    taken = counters.taken()
    assert taken is not None
    assert taken.data == {"loads": 3, **{f"tier_hits/{name}": 5 for name in names}}
