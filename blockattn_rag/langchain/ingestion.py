"""Ingestion of documents: an encoding step, and download-free embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from langchain_core.documents import BaseDocumentTransformer, Document
from langchain_core.embeddings import Embeddings
from pydantic import Field, PrivateAttr

from blockattn_rag.adapters.arguments import check_items
from blockattn_rag.adapters.hashed_embedding import hashed_vectors
from blockattn_rag.adapters.sources import Source, ingestion_source
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.langchain.documents import BlockDocumentPrompt, DocumentPromptField
from blockattn_rag.langchain.fields import SourceFields
from blockattn_rag.prompts.formats import BLANK_LINE


class BlockKVTransformer(SourceFields, BaseDocumentTransformer):
    """Ingestion step that encodes documents as blocks, stores their KV, and adds their handles.

    Put it after the splitter and before the vector store. Blocks that are already stored are
    skipped, including those of an interrupted run. Returned documents are copies. Those with text
    have a handle (``metadata["kv_handle"]``) and a digest to detect stale handles (``kv_source``).

    Args:
        model, engine, kv_store, block_template, recipe, ...: See ``SourceFields``.
        llm: Chat model, with or without bound options, whose model, store and recipe are used, and
            whose template is the default. Replaces the above, except ``block_template``.
        server: Address of a server that encodes the documents into its own store, such as
            ``"http://gpu:8000"``, or a list of servers that share a store. Replaces the above.
        journal: Folder that records which server stored which passage (see ``ServerPool``).
        api_key: API key of the server. Neither printed nor pickled. Default: the environment
            variable ``BLOCKATTN_RAG_API_KEY``.
        document_prompt: Prompt that formats one document. The chain must use the same prompt.
        show_progress: Whether to show a progress bar.

    Example::

        chunks = splitter.split_documents(documents)
        vector_store.add_documents(BlockKVTransformer(llm=chat).transform_documents(chunks))
    """

    apart: ClassVar[tuple[str, ...]] = ("engine", "llm", "api_key")

    server: str | list[str] | None = None
    journal: str | None = None
    document_prompt: DocumentPromptField = Field(default_factory=BlockDocumentPrompt)
    show_progress: bool = False

    _stats: EncodeStats | None = PrivateAttr(default=None)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)

    @classmethod
    def _source_of(cls, fields: dict[str, Any], arguments: dict[str, Any]) -> Source:
        llm = fields.pop("llm", None)
        fields.setdefault("block_template", getattr(llm, "block_template", BLANK_LINE))
        served = {name: fields.pop(name, None) for name in ("server", "api_key", "journal")}
        return ingestion_source(llm, "ChatBlockAttention", **served, **arguments)

    @property
    def stats(self) -> EncodeStats | None:
        """Statistics of the last call, or None before the first call."""
        return self._stats

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        """Encode documents that are not stored yet. Returns copies of all, with their handles."""
        check_items(documents, Document, "convert texts to documents: [Document(text)]")
        texts = [self.document_prompt.canonical_text(document) for document in documents]
        encoded = [text for text in texts if text]
        self._stats = self.source.encode(
            encoded, self.block_template, show_progress=self.show_progress
        )
        return [self.document_prompt.stamp(document) for document in documents]


class HashingEmbeddings(Embeddings):
    """Embedding model that counts hashed words and character n-grams, and needs no download.

    It matches only passages that share words with the question. Do not use it in production.

    Args:
        dimensions: Number of dimensions of the vectors, which have length 1.
    """

    def __init__(self, dimensions: int = 2048) -> None:
        self.dimensions = dimensions

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return hashed_vectors(texts, self.dimensions) if texts else []

    def embed_query(self, text: str) -> list[float]:
        return hashed_vectors([text], self.dimensions)[0]
