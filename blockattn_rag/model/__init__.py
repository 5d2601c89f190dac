"""The seam to transformers: loading, the layout probe, encoding, generation, the fingerprint."""

from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.encoding import EncodeRequest

__all__ = ["BlockModel", "EncodeRequest"]
