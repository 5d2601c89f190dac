from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import TextNode
from llama_index.vector_stores.chroma import ChromaVectorStore

from blockattn_rag.adapters.handles import HANDLE_KEY, live_handles
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
    add_nodes,
    block_query_engine,
)
from blockattn_rag.prompts.blocks import handle_of
from tests.llama_index.conftest import RecordingEngine
from tests.recording import recorded

EMBED = HashingEmbedding(128)
FACTS = [
    Document(text=f"The {name} weighs {i} stones.", id_=name)
    for i, name in enumerate(["otter", "heron", "badger", "newt"], start=2)
]


@pytest.fixture
def store(chroma_client: Any) -> ChromaVectorStore:
    return ChromaVectorStore(chroma_collection=chroma_client.create_collection(uuid4().hex))


def test_passages_ingested_into_chroma_are_reused_in_answers(
    store: ChromaVectorStore, llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    steps = [SentenceSplitter(chunk_size=128, chunk_overlap=0), BlockKVTransform(llm=llm), EMBED]
    IngestionPipeline(transformations=steps, vector_store=store).run(documents=FACTS)
    index = VectorStoreIndex.from_vector_store(store, embed_model=EMBED)
    marked = BlockKVPostprocessor()
    answers = index.as_query_engine(llm=llm, node_postprocessors=[marked], similarity_top_k=2)
    response = answers.query("How much does the heron weigh?")
    call = engine.calls[0]
    passages = [b.text for b in call.prompt.context if b.is_passage]
    assert "heron weighs 3" in passages[0]
    assert len(passages) == 2
    assert call.answer.stats.hits == 2  # the passages, but not the text before them
    assert str(response) == RecordingEngine(engine.model).generate(
        call.prompt, max_new_tokens=4
    ).text  # fmt: skip
    assert [n.get_content() for n in response.source_nodes] == passages
    handles = live_handles([store.client])
    assert handles == {handle_of(f"The {d.id_} weighs {i} stones.") for i, d in enumerate(FACTS, 2)}


def test_nodes_are_added_in_batches_that_chroma_accepts(
    chroma_client: Any, store: ChromaVectorStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(chroma_client), "get_max_batch_size", lambda _: 3)
    added = recorded(monkeypatch, type(store.client), "add")
    nodes = EMBED([TextNode(text=f"text {i}", id_=f"n{i}") for i in range(7)])
    assert add_nodes(store, nodes, chroma_client) == [f"n{i}" for i in range(7)]
    assert [len(call.kwargs["ids"]) for call in added] == [3, 3, 1]
    assert store.client.count() == 7


@pytest.mark.parametrize("handle", ["stale", "forged", "missing", "foreign", "odd"])
def test_wrong_handles_never_change_answers(
    handle: str, store: ChromaVectorStore, llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    texts = [d.text for d in FACTS[:2]]
    nodes = BlockKVTransform(llm=llm)([TextNode(text=t, id_=t[:9]) for t in texts])
    wrong: dict[str, Any] = {
        "stale": handle_of("what it said before"),
        "forged": nodes[1].metadata[HANDLE_KEY],
        "foreign": "another tool's value",
        "odd": 7,
    }
    for node in nodes:
        node.metadata.pop(HANDLE_KEY)
        if handle in wrong:
            node.metadata[HANDLE_KEY] = wrong[handle]
    if handle == "missing":
        for key in list(engine.store.keys()):
            engine.store.delete(key)
    store.add(list(EMBED(nodes)))
    index = VectorStoreIndex.from_vector_store(store, embed_model=EMBED)
    response = block_query_engine(index, llm).query("otter heron")
    prompt = engine.calls[0].prompt
    assert sorted(b.text for b in prompt.context if b.is_passage) == sorted(texts)
    expected = RecordingEngine(engine.model).generate(prompt, max_new_tokens=4)
    assert str(response) == expected.text
    assert engine.calls[0].answer.stats.hits == (0 if handle == "missing" else 2)


def test_answers_use_the_text_that_chroma_kept_for_an_id(
    store: ChromaVectorStore, llm: BlockAttentionLLM, engine: RecordingEngine
) -> None:
    transform = BlockKVTransform(llm=llm)
    for text in ("The otter weighs 2 stones.", "The otter weighs 9 stones."):
        store.add(list(EMBED(transform([TextNode(text=text, id_="otter")]))))
    index = VectorStoreIndex.from_vector_store(store, embed_model=EMBED)
    block_query_engine(index, llm).query("otter")
    passages = [b.text for b in engine.calls[0].prompt.context if b.is_passage]
    assert passages == ["The otter weighs 2 stones."]
    assert engine.calls[0].answer.stats.hits == 1
