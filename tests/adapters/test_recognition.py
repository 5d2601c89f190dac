"""Both adapters recognize ingested passages in prompts without markers."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core import Document, VectorStoreIndex

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
)
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import DirectoryStore, MemoryStore, RedisStore
from tests.adapters.frameworks import EACH, Framework
from tests.engines import with_settings

TEXTS = [
    "The height of Halden Tower is 214 metres, and it was built in 1931.",
    "Lake Bon lies north of the city of Halden, and is 31 metres deep.",
]
QUESTION = "What is the height of Halden Tower?"
PLAIN = "Context:\n\n{}\n\nQuestion: {}".format("\n\n".join(TEXTS), QUESTION)


@pytest.fixture(scope="module")
def bundled() -> BlockAttentionEngine:
    engine = BlockAttentionEngine.from_pretrained("bundled", store=MemoryStore(1 << 28))
    engine.encode([Block(text, BLANK_LINE) for text in TEXTS])
    return engine


def passages(prompt: BlockPrompt) -> list[str]:
    return [block.text for block in prompt.context if block.is_passage]


@EACH
def test_passages_are_found_in_plain_text(
    framework: Framework, bundled: BlockAttentionEngine
) -> None:
    chat = framework.chat(bundled, recognize=True)
    assert passages(framework.prompt(chat, ("user", PLAIN))) == TEXTS
    assert passages(framework.prompt(chat, ("user", QUESTION))) == []
    assert passages(framework.prompt(framework.chat(bundled), ("user", PLAIN))) == []


@EACH
def test_system_messages_are_searched_only_on_request(
    framework: Framework, bundled: BlockAttentionEngine
) -> None:
    turns = [("system", f"Context:\n\n{TEXTS[0]}"), ("user", QUESTION)]
    for option, expected in ((True, []), ("system", TEXTS[:1])):
        chat = framework.chat(bundled, recognize=option)
        assert passages(framework.prompt(chat, *turns)) == expected


@EACH
def test_quotes_in_earlier_answers_are_not_recognized(
    framework: Framework, bundled: BlockAttentionEngine
) -> None:
    turns = [("user", PLAIN), ("assistant", f"It says: {TEXTS[0]}"), ("user", "And how deep?")]
    prompt = framework.prompt(framework.chat(bundled, recognize=True), *turns)
    assert passages(prompt) == TEXTS
    assert TEXTS[0] in prompt.final


@EACH
def test_ingested_passages_are_reused_without_markers(
    framework: Framework, bundled: BlockAttentionEngine
) -> None:
    engine = with_settings(bundled, namespace=type(framework).__name__)
    chat = framework.chat(engine, 4, recognize=True)
    assert passages(framework.prompt(chat, ("user", PLAIN))) == []
    framework.ingest(framework.ingestion(llm=chat), TEXTS)
    assert passages(framework.prompt(chat, ("user", PLAIN))) == TEXTS
    assert framework.ask(chat, "whole", PLAIN).reuse["hits"] == 2


def test_recognition_gives_the_same_blocks_as_the_postprocessor(
    bundled: BlockAttentionEngine,
) -> None:
    engine = with_settings(bundled, namespace="pipeline")
    llm, plain = (BlockAttentionLLM(engine=engine, recognize=flag) for flag in (True, False))
    nodes = BlockKVTransform(llm=llm)([Document(text=text) for text in TEXTS])
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
    answers = [
        index.as_query_engine(llm=one, node_postprocessors=steps).query(QUESTION)
        for one, steps in ((llm, []), (plain, [BlockKVPostprocessor()]))
    ]
    assert str(answers[0]) == str(answers[1])


def test_another_process_finds_passages(bundled: BlockAttentionEngine, tmp_path: Path) -> None:
    first = BlockAttentionEngine(bundled.model, DirectoryStore(tmp_path))
    first.encode(TEXTS)
    second = BlockAttentionEngine(bundled.model, DirectoryStore(tmp_path), read_only=True)
    llm = BlockAttentionLLM(engine=second, recognize=True)
    assert passages(llm.to_prompt(PLAIN)) == TEXTS


def test_a_read_only_engine_writes_no_index(bundled: BlockAttentionEngine, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    BlockAttentionEngine(bundled.model, store).encode(TEXTS[:1])
    BlockAttentionEngine(bundled.model, store, namespace="other").encode(TEXTS[:1])
    own = BlockAttentionEngine(bundled.model, store, read_only=True)
    before = store.sidecar.names("passages-1")
    own.encode(TEXTS[:1])
    assert store.sidecar.names("passages-1") == before


@EACH
def test_models_that_cannot_recognize_passages_are_refused(framework: Framework) -> None:
    store = RedisStore("redis://127.0.0.1:9/0")
    with pytest.raises(ValueError, match="cannot store a passage index"):
        framework.chat("bundled", kv_store=store, recognize=True)
