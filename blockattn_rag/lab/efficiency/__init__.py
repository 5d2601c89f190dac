"""Efficiency benchmarks, which compare times, throughput and memory of all paths in one run."""

from blockattn_rag.lab.efficiency.latency import (
    measure_batch,
    measure_decode,
    measure_shared,
    measure_ttft,
)
from blockattn_rag.lab.efficiency.resources import measure_ingest, measure_memory
from blockattn_rag.lab.efficiency.timing import machine

__all__ = [
    "machine",
    "measure_batch",
    "measure_decode",
    "measure_ingest",
    "measure_memory",
    "measure_shared",
    "measure_ttft",
]
