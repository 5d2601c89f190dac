"""Ingestion and retrieval steps: the transformer and the compressor."""

from __future__ import annotations

import logging
import pickle

import pytest
from langchain_classic.retrievers import ParentDocumentRetriever
from langchain_core.documents import Document
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVCompressor,
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    format_blocks,
    live_handles,
)
from blockattn_rag.prompts.blocks import handle_of
from tests.langchain.conftest import passages

TITLED = BlockDocumentPrompt.from_template("title: {title}\n\n{page_content}")


async def test_ingestion_runs_asynchronously_and_shows_progress(
    chat: ChatBlockAttention, capsys: pytest.CaptureFixture[str]
) -> None:
    transformer = BlockKVTransformer(engine=chat.engine, show_progress=True, document_prompt=TITLED)
    stamped = await transformer.atransform_documents(passages(2))
    assert stamped[0].metadata["kv_handle"] == handle_of(TITLED.canonical_text(passages(1)[0]))
    assert "Encoding tokens" in capsys.readouterr().err


def test_the_compressor_replaces_stale_handles_and_logs_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compressor = BlockKVCompressor()
    fresh = [BlockDocumentPrompt().stamp(document) for document in passages(2)]
    stale = fresh[0].model_copy(update={"page_content": "New text."})
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        assert list(compressor.compress_documents(fresh, "q")) == fresh
        assert not caplog.records
        mended = compressor.compress_documents([stale, fresh[1], Document("never stamped")], "q")
    assert [d.metadata["kv_handle"] for d in mended] == [
        handle_of(d.page_content.strip()) for d in (stale, fresh[1], Document("never stamped"))
    ]
    assert "1 of 3 retrieved documents" in caplog.text
    # The mismatch may be caused by an extractor rather than by the vector store.
    assert "If a previous step shortens or rewrites documents" in caplog.text


def test_a_compressor_pickles() -> None:
    compressor = BlockKVCompressor(document_prompt=TITLED)
    assert pickle.loads(pickle.dumps(compressor)).document_prompt == TITLED


def test_parent_documents_of_small_chunks_are_hits(chat: ChatBlockAttention) -> None:
    docstore = InMemoryStore()
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(HashingEmbeddings(dimensions=64)),
        docstore=docstore,
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=30, chunk_overlap=0),
    )
    parents = BlockKVTransformer(llm=chat).transform_documents(passages(4))
    retriever.add_documents(parents)
    found = retriever.invoke("w2x1 w2x2")
    assert {d.page_content for d in found} <= {d.page_content for d in parents}
    messages = [("system", format_blocks(found)), ("human", "Which?")]
    reuse = chat.invoke(messages).response_metadata["block_attention"]
    assert reuse["hits"] == len(found)
    # The docstore, not the chunks, refers to the blocks of the parents.
    assert live_handles(docstore.mget(list(docstore.yield_keys()))) == {
        handle_of(d.page_content.strip()) for d in parents
    }
