"""Prometheus metrics of the connector and the endpoints, and worker reports."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from blockattn_rag.store.base import TierStats

PLAIN = {
    "answers": "Requests answered in block mode, except answers ended by a stop string.",
    "refused": "Block-mode requests that the engine rejected.",
    "loaded_tokens": "Context tokens whose keys and values were loaded, in answered requests.",
    "local_tokens": "Context tokens found in the engine's prefix cache, in answered requests.",
    "recomputed_tokens": "Loaded tokens that were recomputed, in answered requests.",
    "loads": "Requests whose blocks were loaded, summed over ranks.",
    "load_failures": "Requests whose blocks were not loaded by the deadline, summed over ranks.",
    "load_misses": "Blocks that were missing, damaged or unreadable, summed over ranks.",
    "load_seconds": "Duration of loads, including failed ones, in seconds, summed over ranks.",
    "loaded_blocks": "Blocks loaded, summed over ranks.",
    "loaded_bytes": "Bytes of keys and values loaded, summed over ranks.",
    "saved_blocks": "Blocks encoded by this server and stored.",
    "saved_bytes": "Size in bytes of the blocks that were encoded by this server and stored.",
    "save_failures": "Blocks encoded by this server, but neither stored nor kept in memory.",
    "kept_blocks": "Blocks encoded by this server and kept in memory only, summed over ranks.",
}
"""Counters without a tier label, by Prometheus name without ``vllm:blockattn_`` and ``_total``."""

BY_TIER = {
    "tier_hits": "Blocks read from a tier of the store, summed over ranks.",
    "tier_misses": "Blocks missing or damaged in a tier of the store, summed over ranks.",
    "tier_failures": "Failed reads and writes of a tier, summed over ranks.",
}
"""Counters with a tier label, counted as ``name/tier``."""


class ServingStats(KVConnectorStats):
    """Counts of one step, which vLLM passes from its scheduler and workers to its loggers."""

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
    """Thread-safe counters that are reset when they are read, after each step."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}
        self._lock = threading.Lock()

    def count(self, name: str, more: float = 1, tier: str = "") -> None:
        """Add to a counter of ``PLAIN`` or, with ``tier``, to a counter of ``BY_TIER``."""
        key = f"{name}/{tier}" if tier else name
        with self._lock:
            self._counts[key] = self._counts.get(key, 0) + more

    def count_tiers(
        self, before: Sequence[TierStats], now: Sequence[TierStats], names: Sequence[str]
    ) -> None:
        """Add the differences between two results of ``tier_stats``, per tier."""
        for name, old, new in zip(names, before, now, strict=True):
            for figure in ("hits", "misses", "failures"):
                if more := getattr(new, figure) - getattr(old, figure):
                    self.count(f"tier_{figure}", more, name)

    def taken(self) -> ServingStats | None:
        """Return the counts since the last call, or None if nothing was counted."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return ServingStats(counts) if counts else None


class ServingPromMetrics(KVConnectorPromMetrics):
    """Prometheus counters ``vllm:blockattn_..._total``."""

    def __init__(self, config: Any, metric_types: Any, labels: list[str], labelvalues: Any) -> None:
        super().__init__(config, metric_types, labels, labelvalues)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:blockattn_{name}",
                documentation=text,
                labelnames=[*labels, "tier"] if name in BY_TIER else labels,
            )
            for name, text in (PLAIN | BY_TIER).items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for key, value in transfer_stats_data.items():
            name, *tier = key.split("/")
            self._counters[name].labels(*labels, *tier).inc(value)


class Fetch(NamedTuple):
    """Completed load of a request, with its duration, and the recomputed tokens of each block."""

    seconds: float
    int8_blocks: int
    recomputed: Sequence[int] = ()


class Ended(NamedTuple):
    """Numbers of ranks on which a request's load has ended, and on which it has failed."""

    ranks: int = 0
    failures: int = 0

    def plus(self, other: Ended) -> Ended:
        return Ended(self.ranks + other.ranks, self.failures + other.failures)


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """A rank's report to the scheduler after a step.

    Args:
        ended: Ended loads of requests with tokens to recompute, by request id. All ranks must
            recompute in the same step.
        unsaved: Reasons why encoded blocks could not be stored, by name of the encoding request.
    """

    fetches: dict[str, Fetch] = field(default_factory=dict)
    unsaved: Mapping[str, str] = field(default_factory=dict)
    ended: dict[str, Ended] = field(default_factory=dict)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Combine the reports of two ranks. The slowest load of a request counts."""
        both = dict(self.fetches)
        for request_id, fetch in other.fetches.items():
            both[request_id] = max(both.get(request_id, fetch), fetch)
        ended = dict(self.ended)
        for request_id, end in other.ended.items():
            ended[request_id] = end.plus(ended.get(request_id, Ended()))
        return WorkerReport(both, {**self.unsaved, **other.unsaved}, ended)


# Counters of the API server. Their names must not start with "vllm:", because vLLM unregisters
# counters with this prefix when it starts an engine.
RETRIES = Counter("blockattn_retries", "Block-mode requests retried after a failure.")
CUT_ANSWERS = Counter(
    "blockattn_cut_answers",
    "Block-mode answers ended by a stop string, which the engine does not count.",
)
INDEX_FAILURES = Counter(
    "blockattn_index_failures", "Failed writes of the passage index, which are retried."
)
REQUESTS = Counter(
    "blockattn_requests",
    "Requests to the block-mode endpoints, by path and HTTP status. Streams count when they start.",
    ["path", "status"],
)
