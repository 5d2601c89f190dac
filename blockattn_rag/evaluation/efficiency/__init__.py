"""Measuring efficiency: times, throughput and memory of every path, side by side in one run."""

from blockattn_rag.evaluation.efficiency.batch import measure_batch, measure_shared
from blockattn_rag.evaluation.efficiency.decode import measure_decode
from blockattn_rag.evaluation.efficiency.ingest import measure_ingest
from blockattn_rag.evaluation.efficiency.memory import measure_memory
from blockattn_rag.evaluation.efficiency.timing import machine
from blockattn_rag.evaluation.efficiency.ttft import measure_ttft

__all__ = [
    "machine",
    "measure_batch",
    "measure_decode",
    "measure_ingest",
    "measure_memory",
    "measure_shared",
    "measure_ttft",
]
