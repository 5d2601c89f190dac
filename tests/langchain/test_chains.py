"""The same question through LCEL and the stuff chain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from langchain_chroma import Chroma
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVTransformer,
    ChatBlockAttention,
    format_blocks,
)

HEAD = "Answer the question using only the context below.\n\nContext:\n"
PROMPT = ChatPromptTemplate.from_messages([("system", HEAD + "{context}"), ("human", "{input}")])


class Answer(NamedTuple):
    text: str
    figures: dict[str, Any]


Ask = Callable[[str], Answer]


class Figures(BaseCallbackHandler):
    """Callback that keeps the reuse statistics of the last answer."""

    def __init__(self) -> None:
        self.last: dict[str, Any] = {}

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.last = response.generations[0][0].message.response_metadata["block_attention"]


def by_lcel(chat: ChatBlockAttention, retriever: BaseRetriever, figures: Figures) -> Ask:
    inputs = {"context": retriever | format_blocks, "input": RunnablePassthrough()}
    chain = inputs | PROMPT | chat | StrOutputParser()
    return lambda question: Answer(chain.invoke(question, {"callbacks": [figures]}), figures.last)


def by_stuff_chain(chat: ChatBlockAttention, retriever: BaseRetriever, figures: Figures) -> Ask:
    stuff = create_stuff_documents_chain(chat, PROMPT, document_prompt=BlockDocumentPrompt())
    chain = create_retrieval_chain(retriever, stuff)

    def ask(question: str) -> Answer:
        result = chain.invoke({"input": question}, {"callbacks": [figures]})
        assert all("[[kvblock" not in document.page_content for document in result["context"])
        return Answer(result["answer"], figures.last)

    return ask


WAYS = [by_lcel, by_stuff_chain]


def filled(vector_store: Chroma, chat: ChatBlockAttention, texts: Sequence[str]) -> Chroma:
    documents = [Document(text) for text in texts]
    vector_store.add_documents(BlockKVTransformer(llm=chat).transform_documents(documents))
    return vector_store


@pytest.mark.parametrize("way", WAYS)
def test_the_second_question_reuses_every_passage_in_another_order(
    chat: ChatBlockAttention, vector_store: Chroma, way: Callable[..., Ask]
) -> None:
    texts = ["The tower is tall and old.", "The lake is deep.", "The river flows to the sea."]
    retriever = filled(vector_store, chat, texts).as_retriever(search_kwargs={"k": 3})
    questions = ["How tall is the tower?", "How deep is the lake?"]
    orders = [[d.page_content for d in retriever.invoke(question)] for question in questions]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(texts)
    ask = way(chat, retriever, Figures())
    first, second = (ask(question) for question in questions)
    # The miss is the text before the passages.
    assert (first.figures["hits"], first.figures["misses"]) == (3, 1)
    assert (second.figures["hits"], second.figures["misses"]) == (4, 0)
    assert len(first.text) == 6
