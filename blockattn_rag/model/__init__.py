"""Interface to transformers: loading, the attention probe, encoding, generation, fingerprints."""

from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.encoding import EncodeRequest

__all__ = ["BlockModel", "EncodeRequest"]
