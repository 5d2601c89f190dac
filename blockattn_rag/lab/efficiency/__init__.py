"""Measuring efficiency: times, throughput and memory of every path, side by side in one run."""

from blockattn_rag.lab.efficiency.batch import measure_batch, measure_shared
from blockattn_rag.lab.efficiency.ingest import measure_ingest
from blockattn_rag.lab.efficiency.latency import measure_decode, measure_ttft
from blockattn_rag.lab.efficiency.memory import measure_memory
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
