"""Documents as blocks: canonical text, handle, prompt with markers, and retrieval step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Self

from langchain_core.callbacks import Callbacks
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.prompts import (
    BasePromptTemplate,
    PromptTemplate,
    StringPromptTemplate,
    format_document,
)
from pydantic import BeforeValidator, Field, model_validator

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.handles import DIGEST_KEY, HANDLE_KEY, TEXT_VARIABLE, digest_of
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.prompts.markers import wrap

logger = logging.getLogger("blockattn_rag")


class BlockDocumentPrompt(StringPromptTemplate):
    """Document prompt that puts each formatted document between block markers.

    Pass it as ``document_prompt=`` to ``create_stuff_documents_chain`` or
    ``create_retriever_tool``. Retrieved documents are not modified.

    Args:
        document_prompt: Prompt that formats a document. Default: its ``page_content``.

    Example::

        BlockDocumentPrompt.from_template("title: {title}\\n\\n{page_content}")
    """

    document_prompt: BasePromptTemplate[str] = Field(
        default_factory=partial(PromptTemplate.from_template, "{page_content}")
    )
    input_variables: list[str] = Field(default_factory=list)

    def __init__(self, **kwargs: Any) -> None:
        check_known(type(self), kwargs, type(self).model_fields)
        super().__init__(**kwargs)

    @model_validator(mode="after")
    def _take_variables(self) -> Self:
        names = self.document_prompt.input_variables
        self.input_variables = [name for name in names if name not in self.partial_variables]
        return self

    @classmethod
    def from_template(cls, template: str, **kwargs: Any) -> BlockDocumentPrompt:
        return cls(document_prompt=PromptTemplate.from_template(template, **kwargs))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Return False, because LangChain's ``load`` supports only LangChain's classes."""
        return False

    @property
    def _prompt_type(self) -> str:
        return "block-document"

    def format(self, **kwargs: Any) -> str:
        """Format a document between block markers. Returns an empty string if it has no text."""
        return wrap(self.document_prompt.format(**self._merge_partial_and_user_variables(**kwargs)))

    def canonical_text(self, document: Document) -> str:
        values = self._merge_partial_and_user_variables()
        return format_document(document, self.document_prompt.partial(**values)).strip()

    def stamp(self, document: Document) -> Document:
        """Return a copy of the document. If it has text, its handle is added to the metadata."""
        metadata = {k: v for k, v in document.metadata.items() if k not in (HANDLE_KEY, DIGEST_KEY)}
        if text := self.canonical_text(document):
            values = {TEXT_VARIABLE: document.page_content, **metadata}
            metadata[DIGEST_KEY] = digest_of({name: values[name] for name in self.input_variables})
            metadata[HANDLE_KEY] = handle_of(text)
        return document.model_copy(update={"metadata": metadata})


def as_block_prompt(document_prompt: BasePromptTemplate[str] | None) -> BlockDocumentPrompt:
    if isinstance(document_prompt, BlockDocumentPrompt):
        return document_prompt
    if document_prompt is None:
        return BlockDocumentPrompt()
    return BlockDocumentPrompt(document_prompt=document_prompt)


DocumentPromptField = Annotated[BlockDocumentPrompt, BeforeValidator(as_block_prompt)]


def format_blocks(
    documents: Sequence[Document], document_prompt: BasePromptTemplate[str] | None = None
) -> str:
    """Format documents as one string of marked passages, as in ``retriever | format_blocks``.

    Args:
        documents: Documents in prompt order. Empty documents are omitted.
        document_prompt: Prompt that formats a document. Default: the document's ``page_content``.
    """
    prompt = as_block_prompt(document_prompt)
    texts = (format_document(document, prompt) for document in documents)
    return "\n\n".join(text for text in texts if text)


class BlockKVCompressor(BaseDocumentCompressor):
    """Document compressor that updates each document's handle to that of its current text.

    Use it in ``ContextualCompressionRetriever``. Returns all documents, with their full text. Stale
    handles are replaced, and a warning is logged: answers are correct, but the documents have to be
    encoded again. Either their text was replaced in the vector store without ingestion, or an
    earlier step shortens documents for each question.

    Args:
        document_prompt: Prompt that formats one document. The chain must use the same prompt.
    """

    document_prompt: DocumentPromptField = Field(default_factory=BlockDocumentPrompt)

    def __init__(self, **arguments: Any) -> None:
        check_known(type(self), arguments, type(self).model_fields)
        super().__init__(**arguments)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> list[Document]:
        stamped = [self.document_prompt.stamp(document) for document in documents]
        stale = sum(
            HANDLE_KEY in old.metadata and old.metadata[HANDLE_KEY] != new.metadata.get(HANDLE_KEY)
            for old, new in zip(documents, stamped, strict=True)
        )
        if stale:
            logger.warning(
                "The text of %d of %d retrieved documents differs from the ingested text, so they "
                "are encoded again. If a previous step shortens or rewrites documents, use a "
                "filter or reranker that keeps them unchanged. Otherwise, their text was replaced "
                "in the vector store: pass changed documents through BlockKVTransformer before "
                "storing them.",
                stale, len(documents),
            )  # fmt: skip
        return stamped
