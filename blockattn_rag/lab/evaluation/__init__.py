"""Measures accuracy and efficiency of full mode and of block mode with recipes."""

from blockattn_rag.lab.evaluation.datasets import EvaluationPassage, EvaluationSample, read_samples
from blockattn_rag.lab.evaluation.fidelity import (
    FidelityReport,
    FidelityResult,
    measure_fidelity,
    read_log,
    replay,
)
from blockattn_rag.lab.evaluation.metrics import (
    Interval,
    bootstrap_mean,
    contains_answer,
    exact_match,
    f1_score,
    normalize_answer,
)
from blockattn_rag.lab.evaluation.records import RecordFile
from blockattn_rag.lab.evaluation.run import (
    EvaluationRecord,
    EvaluationReport,
    ModeResult,
    evaluate,
)

__all__ = [
    "EvaluationPassage",
    "EvaluationRecord",
    "EvaluationReport",
    "EvaluationSample",
    "FidelityReport",
    "FidelityResult",
    "Interval",
    "ModeResult",
    "RecordFile",
    "bootstrap_mean",
    "contains_answer",
    "evaluate",
    "exact_match",
    "f1_score",
    "measure_fidelity",
    "normalize_answer",
    "read_log",
    "read_samples",
    "replay",
]
