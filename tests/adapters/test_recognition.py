"""Both adapters recognize ingested passages in prompts without markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.llms import ChatMessage

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import BlockKVTransformer, ChatBlockAttention
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
)
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import DirectoryStore, MemoryStore, RedisStore
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


def models(engine: BlockAttentionEngine, **options: Any) -> list[Any]:
    """A chat model from each adapter."""
    llama_index = BlockAttentionLLM(engine=engine, max_new_tokens=4, **options)
    return [llama_index, ChatBlockAttention(engine=engine, max_tokens=4, **options)]


def prompt_of(model: Any, text: str) -> BlockPrompt:
    if isinstance(model, ChatBlockAttention):
        return model.to_prompt(model._convert_input([("human", text)]).to_messages())
    made: BlockPrompt = model.to_prompt(text)
    return made


def test_both_adapters_find_passages_in_plain_text(bundled: BlockAttentionEngine) -> None:
    for model in models(bundled, recognize=True):
        assert passages(prompt_of(model, PLAIN)) == TEXTS
        assert passages(prompt_of(model, QUESTION)) == []
    for model in models(bundled):
        assert passages(prompt_of(model, PLAIN)) == []


def test_system_messages_are_searched_only_on_request(bundled: BlockAttentionEngine) -> None:
    turns = [("system", f"Context:\n\n{TEXTS[0]}"), ("user", QUESTION)]
    for option, expected in ((True, []), ("system", TEXTS[:1])):
        llama_index, chat = models(bundled, recognize=option)
        for prompt in (
            llama_index.to_prompt([ChatMessage(text, role=role) for role, text in turns]),
            chat.to_prompt(chat._convert_input(turns).to_messages()),
        ):
            assert passages(prompt) == expected


def test_quotes_in_earlier_answers_are_not_recognized(bundled: BlockAttentionEngine) -> None:
    turns = [("user", PLAIN), ("assistant", f"It says: {TEXTS[0]}"), ("user", "And how deep?")]
    llama_index, chat = models(bundled, recognize=True)
    for prompt in (
        llama_index.to_prompt([ChatMessage(text, role=role) for role, text in turns]),
        chat.to_prompt(chat._convert_input(turns).to_messages()),
    ):
        assert passages(prompt) == TEXTS
        assert TEXTS[0] in prompt.final


def test_an_answer_reuses_passages_without_markers(bundled: BlockAttentionEngine) -> None:
    llama_index, chat = models(bundled, recognize=True)
    usage = llama_index.chat([ChatMessage(PLAIN)]).raw["usage"]
    assert usage["hits"] == 2
    answer = chat.invoke(PLAIN)
    assert answer.response_metadata["block_attention"]["hits"] == 3  # with the text before them


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


def test_an_ingestion_in_langchain_is_recognized(bundled: BlockAttentionEngine) -> None:
    engine = with_settings(bundled, namespace="langchain")
    chat = ChatBlockAttention(engine=engine, recognize=True)
    assert passages(prompt_of(chat, PLAIN)) == []
    transformer = BlockKVTransformer(llm=chat)
    transformer.transform_documents([LangChainDocument(text) for text in TEXTS])
    assert passages(prompt_of(chat, PLAIN)) == TEXTS


def test_another_process_finds_passages(bundled: BlockAttentionEngine, tmp_path: Path) -> None:
    first = BlockAttentionEngine(bundled.model, DirectoryStore(tmp_path))
    first.encode(TEXTS)
    second = BlockAttentionEngine(bundled.model, DirectoryStore(tmp_path), read_only=True)
    assert passages(prompt_of(models(second, recognize=True)[0], PLAIN)) == TEXTS


def test_a_read_only_engine_writes_no_index(bundled: BlockAttentionEngine, tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    BlockAttentionEngine(bundled.model, store).encode(TEXTS[:1])
    BlockAttentionEngine(bundled.model, store, namespace="other").encode(TEXTS[:1])
    own = BlockAttentionEngine(bundled.model, store, read_only=True)
    before = store.sidecar.names("passages-1")
    own.encode(TEXTS[:1])
    assert store.sidecar.names("passages-1") == before


@pytest.mark.parametrize("adapter", [BlockAttentionLLM, ChatBlockAttention])
def test_models_that_cannot_recognize_passages_are_refused(adapter: Any) -> None:
    store = RedisStore("redis://127.0.0.1:9/0")
    with pytest.raises(ValueError, match="cannot store a passage index"):
        adapter(model_name="bundled", kv_store=store, recognize=True)
