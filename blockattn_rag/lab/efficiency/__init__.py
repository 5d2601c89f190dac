"""Efficiency benchmarks, which compare times and memory of all paths in one run."""

from blockattn_rag.lab.efficiency.measure import (
    machine,
    measure_batch,
    measure_decode,
    measure_memory,
    measure_ttft,
)

__all__ = ["machine", "measure_batch", "measure_decode", "measure_memory", "measure_ttft"]
