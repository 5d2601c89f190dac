"""BlockKVTransformer: the ingestion step that computes and stores passages' keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from langchain_core.documents import BaseDocumentTransformer, Document
from pydantic import BeforeValidator, Field, PrivateAttr

from blockattn_rag.adapters.arguments import check_items
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.langchain.documents import BlockDocumentPrompt, as_block_prompt
from blockattn_rag.langchain.fields import EngineFields
from blockattn_rag.prompts.blocks import Block

DocumentPromptField = Annotated[BlockDocumentPrompt, BeforeValidator(as_block_prompt)]


class BlockKVTransformer(EngineFields, BaseDocumentTransformer):
    """Encodes documents as blocks, stores their keys and values, and stamps their handles.

    Put it after the splitter and before the vector store: what is stored is then found by the
    first question. What is stored already is skipped, and every batch is stored as it is done: a
    run that was interrupted goes on where it stopped. Returned documents are copies with
    ``metadata["kv_handle"]`` and ``metadata["kv_source"]``; documents without text get none.

    Args:
        model, engine, llm, kv_store, block_template, recipe, ...: see ``EngineFields``;
            ``llm=chat`` is the usual one.
        document_prompt: formats one document; must be that of the chain. Default: its text.
        show_progress: show a progress bar.

    Example::

        documents = BlockKVTransformer(llm=chat).transform_documents(splitter.split(documents))
        vector_store.add_documents(documents)
    """

    document_prompt: DocumentPromptField = Field(default_factory=BlockDocumentPrompt)
    show_progress: bool = False

    _stats: EncodeStats | None = PrivateAttr(default=None)

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)

    @property
    def stats(self) -> EncodeStats | None:
        """What the last call computed and reused; None before the first."""
        return self._stats

    def transform_documents(self, documents: Sequence[Document], **kwargs: Any) -> list[Document]:
        """Encode what is not stored; copies of the documents, stamped, in the same order."""
        check_items(documents, Document, "make documents of texts: [Document(text)]")
        texts = [self.document_prompt.canonical_text(document) for document in documents]
        blocks = [Block(text, self.block_template) for text in texts if text]
        self._stats = self.engine.precompute(blocks, show_progress=self.show_progress)
        return [self.document_prompt.stamp(document) for document in documents]
