"""The same question through LCEL and the stuff chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from tests.langchain.conftest import reuse_of

HEAD = "Answer the question using only the context below.\n\nContext:\n"
PROMPT = ChatPromptTemplate.from_messages([("system", HEAD + "{context}"), ("human", "{input}")])


Ask = Callable[[str, Any], str]


class Figures(BaseCallbackHandler):
    """Callback that keeps the reuse statistics of all answers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        reuse = reuse_of(response.generations[0][0].message)
        self.seen.append((reuse["hits"], reuse["misses"]))


def by_lcel(chat: ChatBlockAttention, retriever: BaseRetriever) -> Ask:
    inputs = {"context": retriever | format_blocks, "input": RunnablePassthrough()}
    return (inputs | PROMPT | chat | StrOutputParser()).invoke


def by_stuff_chain(chat: ChatBlockAttention, retriever: BaseRetriever) -> Ask:
    stuff = create_stuff_documents_chain(chat, PROMPT, document_prompt=BlockDocumentPrompt())
    chain = create_retrieval_chain(retriever, stuff)

    def ask(question: str, config: Any) -> str:
        result = chain.invoke({"input": question}, config)
        assert all("[[kvblock" not in document.page_content for document in result["context"])
        return str(result["answer"])

    return ask


@pytest.mark.parametrize("way", [by_lcel, by_stuff_chain])
def test_the_second_question_reuses_every_passage_in_another_order(
    chat: ChatBlockAttention, vector_store: Chroma, way: Callable[..., Ask]
) -> None:
    texts = ["The tower is tall and old.", "The lake is deep.", "The river flows to the sea."]
    documents = [Document(text) for text in texts]
    vector_store.add_documents(BlockKVTransformer(llm=chat).transform_documents(documents))
    retriever = vector_store.as_retriever(search_kwargs={"k": 3})
    questions = ["How tall is the tower?", "How deep is the lake?"]
    orders = [[d.page_content for d in retriever.invoke(question)] for question in questions]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(texts)
    ask, figures = way(chat, retriever), Figures()
    answers = [ask(question, {"callbacks": [figures]}) for question in questions]
    assert figures.seen == [(3, 1), (4, 0)]  # the miss is the text before the passages
    assert len(answers[0]) == 6
