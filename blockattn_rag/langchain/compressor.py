"""BlockKVCompressor: updates the handles of retrieved documents, and prefetches their KV."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.langchain.documents import BlockDocumentPrompt, DocumentPromptField
from blockattn_rag.langchain.fields import EngineFields
from blockattn_rag.prompts.blocks import Block

logger = logging.getLogger("blockattn_rag")

# One thread is enough, because the model encodes one request at a time.
_WARMER = ThreadPoolExecutor(1, thread_name_prefix="blockattn-warm")


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
        warm: Whether to also encode documents that are not stored. Needs ``llm``.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    document_prompt: DocumentPromptField = Field(default_factory=BlockDocumentPrompt)
    llm: EngineFields | None = Field(default=None, exclude=True, repr=False)
    warm: bool = False

    _warming: Future[EncodeStats] | None = PrivateAttr(default=None)

    def __init__(self, **arguments: Any) -> None:
        check_known(type(self), arguments, type(self).model_fields)
        super().__init__(**arguments)

    @model_validator(mode="after")
    def _check_llm(self) -> Self:
        if self.warm and self.llm is None:
            raise ValueError("warm=True needs llm=, the model that encodes the documents")
        return self

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
        if self.warm and self.llm is not None:
            self._warming = _WARMER.submit(_warm, self.llm, blocks)
        return stamped

    def wait_until_warm(self, timeout_s: float | None = None) -> EncodeStats | None:
        """Wait until ``warm=True`` has encoded the documents of the last call.

        Args:
            timeout_s: Maximum seconds to wait. Default: no limit.

        Returns:
            Statistics of the encoding, or None if no call was made.

        Raises:
            TimeoutError: Encoding took longer than ``timeout_s``.
        """
        return None if self._warming is None else self._warming.result(timeout_s)

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        private = state.get("__pydantic_private__") or {}
        return {**state, "__pydantic_private__": {**private, "_warming": None}}


def _warm(llm: EngineFields, blocks: list[Block]) -> EncodeStats:
    try:
        return llm.engine.precompute(blocks)
    except Exception as error:
        # Logged, not raised, because the answer computes missing blocks anyway.
        logger.warning("warming the KV store failed: %s", error)
        raise
