"""Documents as blocks: their canonical text, their handle, and the prompt that marks them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.prompts import (
    BasePromptTemplate,
    PromptTemplate,
    StringPromptTemplate,
    format_document,
)
from pydantic import Field, model_validator

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.handles import DIGEST_KEY, HANDLE_KEY, TEXT_VARIABLE, source_of
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.prompts.markers import wrap


class BlockDocumentPrompt(StringPromptTemplate):
    """A document prompt that puts each formatted document between block markers.

    Works as ``document_prompt=`` of ``create_stuff_documents_chain`` and ``create_retriever_tool``.
    Only the formatted text is marked: retrieved documents stay as they are.

    Args:
        document_prompt: formats one document; default: its ``page_content``. Surrounding white
            space is removed.

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
        """For a template string; ``kwargs`` are those of ``PromptTemplate.from_template``."""
        return cls(document_prompt=PromptTemplate.from_template(template, **kwargs))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """False: LangChain's ``load`` revives its own classes only."""
        return False

    @property
    def _prompt_type(self) -> str:
        return "block-document"

    def format(self, **kwargs: Any) -> str:
        """The formatted document between its markers; empty if there is no text."""
        return wrap(self.document_prompt.format(**self._merge_partial_and_user_variables(**kwargs)))

    def canonical_text(self, document: Document) -> str:
        """The text that a document's handle names: formatted, without white space around."""
        values = self._merge_partial_and_user_variables()
        return format_document(document, self.document_prompt.partial(**values)).strip()

    def stamp(self, document: Document) -> Document:
        """A copy whose metadata holds the handle of this very text; none if there is no text."""
        metadata = {k: v for k, v in document.metadata.items() if k not in (HANDLE_KEY, DIGEST_KEY)}
        if text := self.canonical_text(document):
            values = {TEXT_VARIABLE: document.page_content, **metadata}
            metadata[DIGEST_KEY] = source_of({name: values[name] for name in self.input_variables})
            metadata[HANDLE_KEY] = handle_of(text)
        return document.model_copy(update={"metadata": metadata})


def as_block_prompt(document_prompt: BasePromptTemplate[str] | None) -> BlockDocumentPrompt:
    """Any document prompt as one that marks; None is the default one."""
    if isinstance(document_prompt, BlockDocumentPrompt):
        return document_prompt
    if document_prompt is None:
        return BlockDocumentPrompt()
    return BlockDocumentPrompt(document_prompt=document_prompt)


def format_blocks(
    documents: Sequence[Document],
    document_prompt: BasePromptTemplate[str] | None = None,
    *,
    separator: str = "\n\n",
) -> str:
    """Documents as one string of marked passages, for chains: ``retriever | format_blocks``.

    Args:
        documents: in the order of the prompt; empty ones are left out.
        document_prompt: formats one document; default: its ``page_content``.
        separator: between passages. White space only: the model sees the separator of the chat
            model's ``block_template`` in its place.
    """
    prompt = as_block_prompt(document_prompt)
    texts = (format_document(document, prompt) for document in documents)
    return separator.join(text for text in texts if text)
