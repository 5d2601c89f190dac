"""An embedding that needs no download: hashed words, for demos and tests."""

from __future__ import annotations

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import Field

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.hashed_embedding import hashed_vectors


class HashingEmbedding(BaseEmbedding):
    """Counts of hashed words and word pieces, as unit vectors of ``dimensions`` numbers.

    Deterministic, offline, instant. Finds passages that share words with the question, and nothing
    more; for real use take an embedding model.
    """

    dimensions: int = Field(default=2048, description="Length of the vectors.", gt=0)

    def __init__(self, dimensions: int = 2048, **kwargs: Any) -> None:
        check_known(type(self), kwargs, type(self).model_fields)
        super().__init__(**{"model_name": "hashing", "dimensions": dimensions, **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "HashingEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return hashed_vectors(texts, self.dimensions)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_text_embedding(self, text: str) -> Embedding:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)
