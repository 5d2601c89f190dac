"""Changed and deleted documents: answers use the current text, and unused KV is collected."""

from __future__ import annotations

from pathlib import Path

import pytest
from langchain_chroma import Chroma
from langchain_core.documents import Document

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVTransformer,
    ChatBlockAttention,
    format_blocks,
    live_handles,
)
from blockattn_rag.prompts.blocks import Block, handle_of
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import DirectoryStore, gc
from tests.langchain.conftest import passages, tiny_block_model

TITLED = BlockDocumentPrompt.from_template("title: {title}\n\n{page_content}")
NEW = "The tower is 300 metres tall."


@pytest.fixture
def engine(tmp_path: Path) -> BlockAttentionEngine:
    return BlockAttentionEngine(tiny_block_model(), tmp_path / "kv")


@pytest.fixture
def filled(chat: ChatBlockAttention, vector_store: Chroma) -> Chroma:
    documents = BlockKVTransformer(llm=chat, document_prompt=TITLED).transform_documents(passages())
    vector_store.add_documents(documents)
    return vector_store


def collect(engine: BlockAttentionEngine, vector_store: Chroma) -> None:
    assert isinstance(engine.store, DirectoryStore)
    gc(engine.store, live_handles([vector_store._collection]), grace_s=0)


def is_stored(engine: BlockAttentionEngine, document: Document) -> bool:
    return engine.contains(Block(TITLED.canonical_text(document), BLANK_LINE))


def found(vector_store: Chroma) -> dict[str, Document]:
    documents = vector_store.similarity_search("Passage", k=10)
    return {str(document.id): document for document in documents}


def test_after_a_raw_upsert_the_model_reads_the_new_text(
    chat: ChatBlockAttention, engine: BlockAttentionEngine, filled: Chroma
) -> None:
    old = found(filled)["p0"]
    filled.add_documents([Document(NEW, id="p0", metadata={"title": "Title 0"})])
    new = found(filled)["p0"]
    assert new.page_content == NEW
    assert new.metadata["kv_handle"] == old.metadata["kv_handle"]  # Chroma merges metadata
    prompt = chat.to_prompt(chat._convert_input(format_blocks([new], TITLED)).to_messages())
    assert prompt.context[-1].text == f"title: Title 0\n\n{NEW}"
    messages = [("system", format_blocks([new], TITLED)), ("human", "How tall?")]
    fresh = ChatBlockAttention(engine=BlockAttentionEngine(tiny_block_model()), max_tokens=6)
    assert chat.invoke(messages).content == fresh.invoke(messages).content
    collect(engine, filled)
    assert not is_stored(engine, old)
    assert is_stored(engine, found(filled)["p1"])


def test_changing_visible_metadata_frees_the_entry(
    engine: BlockAttentionEngine, filled: Chroma
) -> None:
    old = found(filled)["p0"]
    for metadata, kept in (({"read": 7}, True), ({"title": "Other"}, False)):
        filled.update_document("p0", Document(old.page_content, metadata=metadata, id="p0"))
        collect(engine, filled)
        assert is_stored(engine, old) == kept


def test_an_upsert_through_the_transformer_replaces_handle_and_kv(
    chat: ChatBlockAttention, engine: BlockAttentionEngine, filled: Chroma
) -> None:
    old = found(filled)["p0"]
    changed = Document(NEW, id="p0", metadata={"title": "Title 0"})
    transformer = BlockKVTransformer(llm=chat, document_prompt=TITLED)
    filled.add_documents(transformer.transform_documents([changed]))
    assert found(filled)["p0"].metadata["kv_handle"] == handle_of(f"title: Title 0\n\n{NEW}")
    collect(engine, filled)
    assert is_stored(engine, changed)
    assert not is_stored(engine, old)
