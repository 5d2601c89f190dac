from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_index.core import Document, SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionCache, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter, SentenceWindowNodeParser
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.schema import ImageNode, MediaResource, MetadataMode, Node, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore

from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
    canonical_text,
)
from blockattn_rag.prompts.blocks import Block, BlockTemplate, handle_of
from blockattn_rag.prompts.formats import BLANK_LINE
from tests.engines import tuned_model
from tests.llama_index.conftest import RecordingEngine, passages
from tests.recipes import recipe_of
from tests.recording import recorded


def counts(transform: BlockKVTransform) -> tuple[int, int]:
    assert transform.stats is not None
    return transform.stats.computed, transform.stats.reused


def test_stores_each_passage_once(llm: BlockAttentionLLM, engine: RecordingEngine) -> None:
    transform = BlockKVTransform(llm=llm)
    nodes = passages(3)
    stamped = transform(nodes)
    assert counts(transform) == (3, 0)
    for node, copy in zip(nodes, stamped, strict=True):
        text = canonical_text(node)
        assert copy.metadata[HANDLE_KEY] == handle_of(text)
        assert engine.contains(Block(text, BLANK_LINE))
        for mode in (MetadataMode.LLM, MetadataMode.EMBED):
            assert copy.get_content(mode) == node.get_content(mode)
        assert HANDLE_KEY not in node.metadata
    again = transform(stamped)
    assert counts(transform) == (0, 3)
    assert [n.metadata for n in again] == [n.metadata for n in stamped]


def test_nodes_without_text_pass_through(llm: BlockAttentionLLM) -> None:
    nodes = [
        TextNode(text=" \n"),
        ImageNode(image="aGk="),
        Node(image_resource=MediaResource(data=b"hi")),
    ]
    transform = BlockKVTransform(llm=llm)
    assert all(a is b for a, b in zip(transform(nodes), nodes, strict=True))
    assert transform([]) == []
    assert counts(transform) == (0, 0)


def test_an_interrupted_run_continues_where_it_stopped(
    llm: BlockAttentionLLM, engine: RecordingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []
    put = engine.store.put

    def failing_put(key: str, kv: Any) -> None:
        if len(stored) == 2:
            raise KeyboardInterrupt
        put(key, kv)
        stored.append(key)

    transform = BlockKVTransform(llm=llm)
    monkeypatch.setattr(engine.store, "put", failing_put)
    with pytest.raises(KeyboardInterrupt):
        transform(passages(5))
    monkeypatch.setattr(engine.store, "put", put)
    transform(passages(5))
    assert counts(transform) == (3, 2)


async def test_shows_progress(llm: BlockAttentionLLM, capsys: pytest.CaptureFixture[str]) -> None:
    BlockKVTransform(llm=llm)(passages(1))
    assert capsys.readouterr().err == ""
    stamped = await BlockKVTransform(llm=llm, show_progress=True).acall(passages(2))
    assert all(HANDLE_KEY in node.metadata for node in stamped)
    assert re.search(r"Encoding tokens: 100%.* (\d+)/\1 ", capsys.readouterr().err)


def test_the_template_defaults_to_that_of_the_llm(engine: RecordingEngine) -> None:
    own = BlockTemplate("- ", "\n")
    llm = BlockAttentionLLM(engine=engine, block_template=own)
    BlockKVTransform(llm=llm)([TextNode(text="a")])
    assert engine.contains(Block("a", own))
    BlockKVTransform(engine=engine)([TextNode(text="b")])
    assert engine.contains(Block("b", BLANK_LINE))


def pipeline(transform: BlockKVTransform, **kwargs: Any) -> IngestionPipeline:
    steps = [SentenceSplitter(chunk_size=128, chunk_overlap=0), transform, HashingEmbedding(64)]
    return IngestionPipeline(transformations=steps, **kwargs)


def documents() -> list[Document]:
    return [Document(text=f"Document {i}. It says {i * 7}.", id_=f"d{i}") for i in range(3)]


def test_identical_ingests_run_the_transform_once(
    llm: BlockAttentionLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = recorded(monkeypatch, BlockKVTransform, "__call__")
    ingest = pipeline(
        BlockKVTransform(llm=llm), docstore=SimpleDocumentStore(), vector_store=SimpleVectorStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS, disable_cache=True,
    )  # fmt: skip
    for _ in range(3):
        ingest.run(documents=documents())
    assert [len(nodes) for _, nodes in (call.args for call in calls) if nodes] == [3]


def test_cached_ingestion_depends_on_model_store_and_template(engine: RecordingEngine) -> None:
    other_engine = RecordingEngine(tuned_model(seed=7))
    other_engine.store = engine.store
    others = [
        BlockKVTransform(engine=other_engine),
        BlockKVTransform(engine=RecordingEngine(engine.model)),
        BlockKVTransform(engine=engine, block_template=BlockTemplate("- ")),
    ]
    cache = IngestionCache()
    first = BlockKVTransform(engine=engine)
    for transform, runs in ((first, True), (first, False), *((other, True) for other in others)):
        before = transform.stats
        nodes = pipeline(transform, cache=cache).run(documents=documents())
        assert all(HANDLE_KEY in node.metadata for node in nodes)
        assert (transform.stats is not before) == runs


def folder(path: Path) -> Path:
    path.mkdir()
    for i in range(3):
        text = f"The height of tower {i} is {i * 7} metres."
        (path / f"{i}.txt").write_text(text, encoding="utf-8")
    return path


def test_passages_of_moved_files_are_hits(
    llm: BlockAttentionLLM, engine: RecordingEngine, tmp_path: Path
) -> None:
    transform = BlockKVTransform(llm=llm)
    steps = [SentenceSplitter(), transform]
    for name, expected in (("here", (3, 0)), ("there", (0, 3))):
        found = SimpleDirectoryReader(folder(tmp_path / name)).load_data()
        nodes = IngestionPipeline(transformations=steps).run(documents=found)
        assert counts(transform) == expected
    assert [node.metadata["file_path"] for node in nodes] == [
        str(tmp_path / "there" / f"{i}.txt") for i in range(3)
    ]
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding(64))
    asking = index.as_query_engine(
        llm=llm, similarity_top_k=3, node_postprocessors=[BlockKVPostprocessor()]
    )
    asking.query("What is the height of tower 2?")
    [call] = engine.calls
    passages = [block.text for block in call.prompt.context if "tower" in block.text]
    assert len(passages) == 3
    assert not any(str(tmp_path) in text for text in passages)
    assert call.answer.stats.hits == 3


def test_file_paths_are_kept_in_blocks_on_request(llm: BlockAttentionLLM, tmp_path: Path) -> None:
    transform = BlockKVTransform(llm=llm, hide_file_paths=False)
    nodes = transform(SimpleDirectoryReader(folder(tmp_path / "here")).load_data())
    assert all(str(tmp_path) in canonical_text(node) for node in nodes)
    assert transform.to_dict()["hide_file_paths"] is False


def test_paths_that_users_made_visible_are_kept_in_blocks(llm: BlockAttentionLLM) -> None:
    readers = {"file_path": "/data/a.txt", "file_name": "a.txt"}
    hidden: Any = {"metadata": readers, "excluded_llm_metadata_keys": ["file_name"]}
    documents = [
        Document(text="a", metadata={"file_path": "/data/a.txt"}),
        Document(text="b", metadata=readers),
        Document(text="c", text_template="From {metadata_str}: {content}", **hidden),
        Document(text="d", metadata_template="{key} = {value}", **hidden),
    ]
    nodes = BlockKVTransform(llm=llm)(documents)
    assert ["/data/a.txt" in canonical_text(node) for node in nodes] == [True] * 4


def test_metadata_key_replaces_the_text(llm: BlockAttentionLLM, engine: RecordingEngine) -> None:
    text = "Halden is tall. It was built in 1931. Ferries go there. The lake is deep."
    sentences = SentenceWindowNodeParser(window_size=1)([Document(text=text)])
    nodes = BlockKVTransform(llm=llm, metadata_key="window")(sentences)
    assert [n.get_content() for n in nodes] == [n.get_content() for n in sentences]
    assert [n.metadata[HANDLE_KEY] for n in nodes] == [
        handle_of(n.metadata["window"].strip()) for n in sentences
    ]
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding(64))
    steps = [MetadataReplacementPostProcessor(target_metadata_key="window"), BlockKVPostprocessor()]
    asking = index.as_query_engine(llm=llm, similarity_top_k=2, node_postprocessors=steps)
    asking.query("When was it built?")
    [call] = engine.calls
    shown = {block.text for block in call.prompt.context if block.is_passage}
    assert len(shown) == 2
    assert shown <= {n.metadata["window"].strip() for n in sentences}
    assert (call.answer.stats.hits, call.answer.stats.misses) == (2, 1)


def test_a_node_without_the_metadata_key_keeps_its_text(llm: BlockAttentionLLM) -> None:
    transform = BlockKVTransform(llm=llm, metadata_key="window")
    [node] = transform([TextNode(text="Alone.")])
    assert node.metadata[HANDLE_KEY] == handle_of("Alone.")
    assert transform.to_dict()["metadata_key"] == "window"
    with pytest.raises(ValueError, match="Expected text in the metadata key 'window' of node n1"):
        transform([TextNode(text="a", id_="n1", metadata={"window": ["not", "text"]})])


def test_an_unknown_metadata_key_is_logged(
    llm: BlockAttentionLLM, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [TextNode(text="a", metadata={"window": "a b"}), TextNode(text="c")]
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        BlockKVTransform(llm=llm, metadata_key="window")(nodes)
        assert not caplog.messages
        BlockKVTransform(llm=llm, metadata_key="windw")(nodes)
    assert any("'windw'" in one and "found window" in one for one in caplog.messages)


def test_warns_once_about_documents_that_are_not_split(
    llm: BlockAttentionLLM, caplog: pytest.LogCaptureFixture
) -> None:
    long = Document(text=500 * "A deep lake at sea. ")  # 10,000 characters
    step, split = BlockKVTransform(llm=llm), SentenceSplitter(chunk_size=100, chunk_overlap=0)
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        IngestionPipeline(transformations=[split, step]).run(documents=[long])
        step([Document(text="The tower is tall.")])
        assert not caplog.messages
        for _ in range(2):
            with pytest.raises(ContextOverflowError):
                step([long])
    [message] = caplog.messages
    assert "an unsplit document of 9999 characters" in message
    assert "transformations=[SentenceSplitter(), BlockKVTransform(llm=llm)]" in message


def test_vectors_are_normalized_and_deterministic() -> None:
    texts = ["The otter swims.", "", "...", "Der Otter schwimmt. 漢字"]
    vectors = np.array(HashingEmbedding(256).get_text_embedding_batch(texts))
    assert vectors.shape == (4, 256)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)
    assert np.array_equal(vectors, HashingEmbedding(256).get_text_embedding_batch(texts))


async def test_a_question_is_nearest_to_the_passage_with_its_words() -> None:
    embed = HashingEmbedding()
    texts = ["The otters live in rivers.", "The heron stands in water.", "Where is the newt?"]
    passages = np.array([await embed.aget_text_embedding(text) for text in texts])
    question = np.array(await embed.aget_query_embedding("Where does the otter live?"))
    assert int(np.argmax(passages @ question)) == 0


def test_the_embedding_works_in_pipelines_and_survives_a_dict() -> None:
    embed = HashingEmbedding.from_dict(HashingEmbedding(32).to_dict())
    [node] = embed([TextNode(text="otter")])
    assert len(node.get_embedding()) == 32


def test_a_cached_ingestion_ends_with_its_recipe(block_model: Any) -> None:
    def cached(recipe: Any) -> dict[str, Any]:
        return BlockKVTransform(engine=RecordingEngine(block_model, recipe=recipe)).to_dict()

    recipe = recipe_of(block_model)
    encodings = [cached(one)["encoding"] for one in ("none", "bos", recipe, recipe)]
    assert encodings[2] == encodings[3]
    assert encodings[0] != encodings[1] != encodings[2]
    promoting = recipe_of(block_model, promote=1)
    assert cached(promoting)["encoding"] == encodings[2]  # promotion does not change the encoding
