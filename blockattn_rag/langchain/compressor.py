"""BlockKVCompressor: updates the handles of retrieved documents, and prefetches their KV."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.langchain.documents import BlockDocumentPrompt, DocumentPromptField
from blockattn_rag.langchain.fields import EngineFields
from blockattn_rag.prompts.blocks import Block

logger = logging.getLogger("blockattn_rag")


class BlockKVCompressor(BaseDocumentCompressor):
    """Gives each retrieved document the handle of its current text.

    For ``ContextualCompressionRetriever``. Returns all documents, with their full text. Stale
    handles are replaced and logged. Answers are correct either way, but a stale handle has one of
    two causes. If the text was replaced in the vector store without ingestion, ``store gc`` uses
    wrong handles. If an earlier step shortens documents, their text differs for every question, so
    their KV is never reused.

    Args:
        document_prompt: Prompt that formats one document. The chain must use the same prompt.
            Default: the document's ``page_content``.
        llm: The chat model, or another component with the same model and store. If given, stored
            documents are read into memory in the background. This saves time if other steps follow
            (a reranker, a tool, a second retriever), so put this step first.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    document_prompt: DocumentPromptField = Field(default_factory=BlockDocumentPrompt)
    llm: EngineFields | None = Field(default=None, exclude=True, repr=False)

    def __init__(self, **arguments: Any) -> None:
        check_known(type(self), arguments, type(self).model_fields)
        super().__init__(**arguments)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        """Return copies of the documents with current handles."""
        stamped = [self.document_prompt.stamp(document) for document in documents]
        stale = sum(
            HANDLE_KEY in old.metadata and old.metadata[HANDLE_KEY] != new.metadata.get(HANDLE_KEY)
            for old, new in zip(documents, stamped, strict=True)
        )
        if stale:
            logger.warning(
                "the text of %d of %d retrieved documents differs from the ingested text, "
                "so their KV is recomputed. If a previous step shortens or rewrites documents, use "
                "a filter or reranker that keeps them whole. Otherwise, their text was replaced in "
                "the vector store: pass changed documents through BlockKVTransformer before "
                "storing them.",
                stale, len(documents),
            )  # fmt: skip
        if self.llm is not None:
            texts = [self.document_prompt.canonical_text(document) for document in stamped]
            blocks = [Block(text, self.llm.block_template) for text in texts if text]
            self.llm.source.prefetch(blocks)
        return stamped
