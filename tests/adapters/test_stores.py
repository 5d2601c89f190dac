"""Both adapters over every kind of store: one string says which, and no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document as LangChainDocument
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from llama_index.core import Document, VectorStoreIndex

from blockattn_rag.langchain import (
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    format_blocks,
)
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVPrefetch,
    BlockKVTransform,
    HashingEmbedding,
    configure,
)
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore, ObjectStore, RedisStore
from tests.engines import local

TEXT = "The height of Halden Tower is 214 metres."
QUESTION = "What is the height of Halden Tower?"

KINDS: dict[str, type[KVStore]] = {
    "folder": DirectoryStore,
    "memory": MemoryStore,
    "s3": ObjectStore,
    "redis": RedisStore,
}


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, type[KVStore]]:
    """An address, and the store that it means."""
    addresses: dict[str, Callable[[], str]] = {
        "folder": lambda: str(tmp_path / "kv"),
        "memory": lambda: "memory:64MiB",
        "s3": lambda: str(request.getfixturevalue("s3")),
        "redis": lambda: str(request.getfixturevalue("redis_url")),
    }
    return addresses[request.param](), KINDS[request.param]


def test_llama_index_answers_the_same_over_every_store(place: tuple[str, type[KVStore]]) -> None:
    llm = BlockAttentionLLM(model_name="bundled", kv_store=place[0])
    configure(llm)
    nodes = BlockKVTransform(llm=llm)([Document(text=TEXT)])
    assert isinstance(local(llm.engine).store, place[1])
    assert local(llm.engine).store.stats().entries >= 1
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
    steps = [BlockKVPrefetch(llm=llm), BlockKVPostprocessor()]
    asked = index.as_query_engine(llm=llm, node_postprocessors=steps)
    assert str(asked.query(QUESTION)).strip() == TEXT


def test_langchain_over_chroma_answers_the_same_over_every_store(
    place: tuple[str, type[KVStore]],
) -> None:
    chat = ChatBlockAttention(model="bundled", kv_store=place[0])
    documents = BlockKVTransformer(llm=chat).transform_documents([LangChainDocument(TEXT)])
    assert isinstance(local(chat.engine).store, place[1])
    retriever = Chroma.from_documents(
        list(documents), HashingEmbeddings(), collection_name=place[1].__name__
    ).as_retriever(search_kwargs={"k": 1})
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use only this context.\n\nContext:\n{context}"), ("human", "{question}")]
    )
    inputs = {"context": retriever | format_blocks, "question": RunnablePassthrough()}
    answer = (inputs | prompt | chat).invoke(QUESTION)
    assert str(answer.content).strip() == TEXT
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
