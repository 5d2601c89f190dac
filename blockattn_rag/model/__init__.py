"""The seam to transformers: loading, the layout probe, encoding, generation, the fingerprint."""

from blockattn_rag.model.check import CheckReport, CheckRow, check_model
from blockattn_rag.model.model import BlockModel
from blockattn_rag.model.requests import EncodeRequest

__all__ = ["BlockModel", "CheckReport", "CheckRow", "EncodeRequest", "check_model"]
