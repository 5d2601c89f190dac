"""The same question through LCEL, the stuff chain, and a retriever tool in an agent loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_chroma import Chroma
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool

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


class RetrieveFirst(AgentMiddleware[Any, Any]):
    """Middleware that retrieves passages for every question, for models that call no tools."""

    def __init__(self, tool: str) -> None:
        super().__init__()
        self._tool = tool

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        last = request.messages[-1]
        if isinstance(last, ToolMessage):
            return handler(request.override(tools=[]))
        call = {"name": self._tool, "args": {"query": last.content}, "id": "1", "type": "tool_call"}
        return AIMessage("", tool_calls=[call])


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


def by_agent(chat: ChatBlockAttention, retriever: BaseRetriever, figures: Figures) -> Ask:
    tool = create_retriever_tool(
        retriever, "encyclopedia", "Looks things up.", document_prompt=BlockDocumentPrompt()
    )
    middleware = [RetrieveFirst(tool.name)]
    agent: Any = create_agent(chat, [tool], system_prompt=HEAD.strip(), middleware=middleware)

    def ask(question: str) -> Answer:
        result = agent.invoke({"messages": [("human", question)]}, {"callbacks": [figures]})
        return Answer(result["messages"][-1].content, figures.last)

    return ask


WAYS = [by_lcel, by_stuff_chain, by_agent]


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
