"""Measuring accuracy and efficiency: what each attention mode costs and saves."""

from blockattn_rag.evaluation.datasets import EvaluationPassage, EvaluationSample, read_samples
from blockattn_rag.evaluation.diagnosis import diagnose
from blockattn_rag.evaluation.diagnosis_plot import plot_diagnosis
from blockattn_rag.evaluation.fidelity import FidelityReport, FidelityResult, measure_fidelity
from blockattn_rag.evaluation.metrics import (
    Interval,
    bootstrap_mean,
    contains_answer,
    exact_match,
    f1_score,
    normalize_answer,
)
from blockattn_rag.evaluation.modes import MODES
from blockattn_rag.evaluation.records import EvaluationRecord, RecordFile
from blockattn_rag.evaluation.run import EvaluationReport, ModeResult, evaluate

__all__ = [
    "MODES",
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
    "diagnose",
    "evaluate",
    "exact_match",
    "f1_score",
    "measure_fidelity",
    "normalize_answer",
    "plot_diagnosis",
    "read_samples",
]
