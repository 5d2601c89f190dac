"""Block-Attention for RAG on a local model.

Passages are encoded once, at ingestion. Their keys and values are stored and reused in every
answer, at any position and in any order.

    >>> from blockattn_rag import BlockAttentionEngine
    >>> engine = BlockAttentionEngine.from_pretrained("bundled")   # doctest: +SKIP
    >>> engine.encode(["Halden Tower is 214 metres tall."])        # doctest: +SKIP

Importing the package is cheap: torch and other large dependencies are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blockattn_rag.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from blockattn_rag.engine import (
        BlockAttentionEngine,
        EncodeStats,
        Generation,
        GenerationChunk,
        Recipe,
        ReuseStats,
    )
    from blockattn_rag.errors import (
        BlockAttnError,
        ContextOverflowError,
        CorruptEntryError,
        DataError,
        DivergedError,
        FingerprintMismatchError,
        MissError,
        SegmentationError,
        ServingError,
        StoreError,
        StoreUnavailableError,
        UnsupportedModelError,
    )
    from blockattn_rag.kv import BlockKV
    from blockattn_rag.model import BlockModel
    from blockattn_rag.prompts import (
        Block,
        BlockPrompt,
        BlockTemplate,
        Passage,
        PromptFormat,
        Span,
        handle_of,
        segment,
        strip_markers,
        wrap,
    )
    from blockattn_rag.server import ServerClient
    from blockattn_rag.store import (
        DirectoryStore,
        KVStore,
        MemoryStore,
        ObjectStore,
        RedisStore,
        TieredStore,
        open_store,
    )

__all__ = [
    "Block",
    "BlockAttentionEngine",
    "BlockAttnError",
    "BlockKV",
    "BlockModel",
    "BlockPrompt",
    "BlockTemplate",
    "ContextOverflowError",
    "CorruptEntryError",
    "DataError",
    "DirectoryStore",
    "DivergedError",
    "EncodeStats",
    "FingerprintMismatchError",
    "Generation",
    "GenerationChunk",
    "KVStore",
    "MemoryStore",
    "MissError",
    "ObjectStore",
    "Passage",
    "PromptFormat",
    "Recipe",
    "RedisStore",
    "ReuseStats",
    "SegmentationError",
    "ServerClient",
    "ServingError",
    "Span",
    "StoreError",
    "StoreUnavailableError",
    "TieredStore",
    "UnsupportedModelError",
    "__version__",
    "handle_of",
    "open_store",
    "segment",
    "strip_markers",
    "wrap",
]

__getattr__, __dir__ = lazy_names(__name__)
