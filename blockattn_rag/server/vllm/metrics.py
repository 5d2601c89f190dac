"""What the connector counts, on the way from its workers to Prometheus."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from blockattn_rag.server.loader import LoaderStats
from blockattn_rag.store.tier import TierStats

PLAIN = {
    "answers": "Requests answered in block mode, but for those that a stop string ended.",
    "refused": "Requests in block mode that were refused by the engine.",
    "loaded_tokens": "Context tokens whose keys and values were loaded, of answered requests.",
    "local_tokens": "Context tokens found in the engine's own cache, of answered requests.",
    "loads": "Requests whose blocks were loaded, by ranks.",
    "load_failures": "Requests of which a block was missing, damaged or late, by ranks.",
    "load_misses": "Blocks that were missing or damaged, by ranks.",
    "load_seconds": "Seconds from asking for blocks until they were in memory, over all loads.",
    "loaded_blocks": "Blocks that were loaded, by ranks.",
    "loaded_bytes": "Bytes of keys and values that were loaded, by ranks.",
    "saved_blocks": "Blocks that were encoded here and stored.",
    "saved_bytes": "Bytes of these blocks, as they are stored.",
    "save_failures": "Blocks that were encoded here and could not be kept.",
    "kept_blocks": "Blocks that were encoded here and kept in memory alone, by ranks.",
}
"""What is counted once; names as in Prometheus, without their prefix and ``_total``."""

BY_TIER = {
    "tier_hits": "Blocks that were read from a tier of the store, by ranks.",
    "tier_misses": "Blocks that were not in a tier of the store, or damaged there, by ranks.",
    "tier_failures": "Reads and writes of a tier that failed, by ranks.",
}
"""What is counted for each tier, under ``name/tier``."""


class ServingStats(KVConnectorStats):
    """What was counted in a step, as vLLM carries it from worker to logger."""

    data: dict[str, float]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class Counters:
    """Counts from several threads, taken step by step."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._lock = threading.Lock()

    def count(self, name: str, more: float = 1, tier: str = "") -> None:
        """Add to a counter of ``PLAIN``, or of ``BY_TIER``."""
        key = f"{name}/{tier}" if tier else name
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + more

    def taken(self) -> ServingStats | None:
        """What was counted since this was last asked; None if nothing was."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return ServingStats(counts) if counts else None


_OF_LOADER = {
    "loads": "loads",
    "failures": "load_failures",
    "misses": "load_misses",
    "load_s": "load_seconds",
    "blocks": "loaded_blocks",
    "nbytes": "loaded_bytes",
}
_OF_TIER = ("hits", "misses", "failures")


def count_loads(
    counters: Counters, before: LoaderStats, now: LoaderStats, tiers: Sequence[str]
) -> None:
    """Add what a loader did in between; ``tiers`` are the names of its store's, in their order."""
    for name, counter in _OF_LOADER.items():
        if more := getattr(now, name) - getattr(before, name):
            counters.count(counter, more)
    earlier = before.tiers or (TierStats(""),) * len(now.tiers)
    for name, old, new in zip(tiers, earlier, now.tiers, strict=True):
        for figure in _OF_TIER:
            if more := getattr(new, figure) - getattr(old, figure):
                counters.count(f"tier_{figure}", more, name)


class ServingPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters ``vllm:blockattn_..._total``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._plain = {
            name: self._counter_cls(
                name=f"vllm:blockattn_{name}", documentation=text, labelnames=labelnames
            )
            for name, text in PLAIN.items()
        }
        self._by_tier = {
            name: self._counter_cls(
                name=f"vllm:blockattn_{name}", documentation=text, labelnames=[*labelnames, "tier"]
            )
            for name, text in BY_TIER.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, _, tier = key.partition("/")
            if tier:
                self._by_tier[name].labels(*labels, tier).inc(value)
            else:
                self._plain[name].labels(*labels).inc(value)


class Fetch(NamedTuple):
    """How long a request's blocks took, and how many of them came quantised."""

    seconds: float
    int8_blocks: int


@dataclass(slots=True)
class Fetches(KVConnectorWorkerMetadata):
    """The fetches that a rank finished in a step, by request.

    ``unsaved``: why blocks that were encoded could not be stored, by the name of the encoding
    request.
    """

    of_requests: Mapping[str, Fetch] = field(default_factory=dict)
    unsaved: Mapping[str, str] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Fetches:
        """Of several ranks the slowest one counts."""
        if not isinstance(other, Fetches):
            raise TypeError(f"expected the news of another rank, found {type(other).__name__}")
        both = dict(self.of_requests)
        for request_id, fetch in other.of_requests.items():
            both[request_id] = max(both.get(request_id, fetch), fetch)
        return Fetches(both, {**self.unsaved, **other.unsaved})
