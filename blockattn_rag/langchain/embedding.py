"""HashingEmbeddings: an embedding for LangChain that needs no download."""

from __future__ import annotations

from langchain_core.embeddings import Embeddings

from blockattn_rag.adapters.hashed_embedding import hashed_vectors


class HashingEmbeddings(Embeddings):
    """Counts of hashed words and word pieces, as unit vectors of ``dimensions`` numbers.

    Deterministic, offline, instant. Finds passages that share words with the question, and nothing
    more; for real use take an embedding model.
    """

    def __init__(self, dimensions: int = 2048) -> None:
        self.dimensions = dimensions

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return hashed_vectors(texts, self.dimensions) if texts else []

    def embed_query(self, text: str) -> list[float]:
        return hashed_vectors([text], self.dimensions)[0]
