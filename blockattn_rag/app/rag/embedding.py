"""The embedding of a database, by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import blockattn_rag.llama_index as adapter

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

HASHING = "hashing"


def load_embedding(name: str) -> BaseEmbedding:
    """``hashing`` (offline, no weights) or an embedding from HuggingFace."""
    if name == HASHING:
        return adapter.HashingEmbedding()
    _check_folder(name)
    try:
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"embedding {name!r} needs another package: pip install "
            f"llama-index-embeddings-huggingface; or use --embedding {HASHING}"
        ) from error
    embedding: BaseEmbedding = HuggingFaceEmbedding(model_name=name)
    return embedding


def whole_embedding(name: str) -> str:
    """A folder's absolute path, so that it is found from anywhere; other names unchanged."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name != HASHING and path.is_dir() else name


def _check_folder(name: str) -> None:
    if name.startswith(("/", "./", "../", "~")) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(
            f"no such embedding: {name}; expected the folder of a sentence-transformers model, a "
            f"hub id or {HASHING!r}"
        )
