"""Fixtures: a tiny model that writes letters, and Chroma, embedded and as a server."""

from __future__ import annotations

import string
from collections.abc import Iterable
from functools import lru_cache, reduce
from operator import add
from typing import Any
from uuid import uuid4

import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.tools import tool

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, HashingEmbeddings
from blockattn_rag.model import BlockModel
from blockattn_rag.store import MemoryStore
from tests.engines import tuned_model
from tests.scripted import Script, ScriptedEngine


@lru_cache(maxsize=1)
def tiny_block_model() -> BlockModel:
    return tuned_model(letters=string.ascii_letters, max_position_embeddings=8192)


@pytest.fixture
def engine() -> BlockAttentionEngine:
    return BlockAttentionEngine(tiny_block_model(), MemoryStore(1 << 28))


@pytest.fixture
def chat(engine: BlockAttentionEngine) -> ChatBlockAttention:
    return ChatBlockAttention(engine=engine, max_tokens=6)


def scripted(answer: str | Script, max_tokens: int = 300, **options: Any) -> ChatBlockAttention:
    script = (lambda _: answer) if isinstance(answer, str) else answer
    engine = ScriptedEngine(script, model=options.pop("model", None))
    return ChatBlockAttention(engine=engine, max_tokens=max_tokens, **options)


def reuse_of(message: BaseMessage) -> dict[str, Any]:
    figures: dict[str, Any] = message.response_metadata["block_attention"]
    return figures


def whole(chunks: Iterable[Any]) -> AIMessageChunk:
    message: AIMessageChunk = reduce(add, chunks)
    return message


@tool
def look_up(query: str) -> str:
    """Look something up."""
    return f"found {query}"


LOOKING_UP = '<tool_call>\n{"name": "look_up", "arguments": {"query": "towers"}}\n</tool_call>'


def passages(count: int = 3, size: int = 60) -> list[Document]:
    """Return documents of about ``size`` characters, with titles and without common words."""
    return [
        Document(
            page_content=f" Passage {n}: {' '.join(f'w{n}x{i}' for i in range(size // 6))}.\n",
            metadata={"title": f"Title {n}"},
            id=f"p{n}",
        )
        for n in range(count)
    ]


@pytest.fixture
def vector_store(chroma_client: Any) -> Chroma:
    """A new, empty collection."""
    return Chroma(
        client=chroma_client,
        collection_name=f"passages-{uuid4().hex}",
        embedding_function=HashingEmbeddings(),
    )
