"""LangChain's classes with a server's address do what they do with a model of this process."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.messages import AIMessageChunk
from langchain_core.runnables import ConfigurableField
from pydantic import SecretStr

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.errors import ServingError
from blockattn_rag.langchain import (
    BlockKVCompressor,
    BlockKVTransformer,
    ChatBlockAttention,
    format_blocks,
)
from blockattn_rag.server.protocol import COMPLETIONS
from tests.server.client.conftest import Serve
from tests.server.client.fake_server import FakeServer, RefusalError, fault

KEY = "the-secret"
DOCUMENTS = [Document(f"Tower {n} is {100 + n} metres tall.") for n in range(3)]
MESSAGES = [("system", f"Context: {format_blocks(DOCUMENTS)}"), ("human", "Which?")]


def remote(url: str, tokenizer: str, **options: Any) -> ChatBlockAttention:
    return ChatBlockAttention(
        model="the-model",
        base_url=f"{url}/v1",
        **{"max_tokens": 6, "model_kwargs": {"tokenizer": tokenizer}, **options},
    )


@pytest.fixture
def chat(server: FakeServer, saved: str) -> ChatBlockAttention:
    return remote(server.url, saved)


@pytest.fixture
def here(local: BlockAttentionEngine) -> ChatBlockAttention:
    """The measure: the same class over a model of this process."""
    return ChatBlockAttention(engine=local, max_tokens=6)


def figures(message: Any) -> dict[str, Any]:
    stats = message.response_metadata["block_attention"]
    return {name: value for name, value in stats.items() if not name.endswith("_s")}


def streamed(chat: ChatBlockAttention) -> Any:
    whole = AIMessageChunk(content="")
    for chunk in chat.stream(MESSAGES):
        whole += chunk
    return whole


def astreamed(chat: ChatBlockAttention) -> Any:
    async def read() -> Any:
        whole = AIMessageChunk(content="")
        async for chunk in chat.astream(MESSAGES):
            whole += chunk
        return whole

    return asyncio.run(read())


@pytest.mark.parametrize(
    "ask",
    [
        lambda chat: chat.invoke(MESSAGES),
        lambda chat: asyncio.run(chat.ainvoke(MESSAGES)),
        streamed,
        astreamed,
    ],
)
def test_chat_equals_local(chat: ChatBlockAttention, here: ChatBlockAttention, ask: Any) -> None:
    for _ in range(2):  # computed, then reused
        found, expected = ask(chat), ask(here)
        assert found.content == expected.content
        assert figures(found) == figures(expected)
        assert found.usage_metadata == expected.usage_metadata
    assert found.usage_metadata["input_token_details"]["cache_read"] > 0
    assert found.response_metadata["model_name"] == "the-model"


def test_batches_are_answered_side_by_side(
    server: FakeServer, chat: ChatBlockAttention, here: ChatBlockAttention
) -> None:
    inputs: list[Any] = [[*MESSAGES[:1], ("human", f"Question {n}?")] for n in range(5)]
    expected = [here.invoke(one).content for one in inputs]
    assert [one.content for one in chat.batch(inputs)] == expected
    assert server.most_at_once > 1
    assert [one.content for one in asyncio.run(chat.abatch(inputs))] == expected
    seeded = chat.batch(inputs[:2], temperature=1.5, seed=3)
    alone = [here.invoke(one, temperature=1.5, seed=3).content for one in inputs[:2]]
    assert [one.content for one in seeded] == alone


def test_documents_are_encoded_by_the_server(chat: ChatBlockAttention) -> None:
    transformer = BlockKVTransformer(llm=chat)
    stamped = transformer.transform_documents(DOCUMENTS)
    assert transformer.stats is not None
    assert transformer.stats.computed == 3
    compressor = BlockKVCompressor(llm=chat, warm=True)
    assert compressor.compress_documents(stamped, "Which?") == stamped
    warmed = compressor.wait_until_warm(60)
    assert warmed is not None
    assert (warmed.computed, warmed.reused) == (0, 3)


@pytest.mark.parametrize("key", [KEY, SecretStr(KEY)])
def test_the_key_is_neither_shown_nor_pickled(
    serve: Serve, saved: str, key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = remote(serve(api_key=KEY).url, saved, api_key=key)
    text = chat.invoke(MESSAGES).content
    known = (chat._identifying_params, chat.model_dump(), chat.lc_attributes)
    for shown in (repr(chat), str(chat), chat.model_dump_json(), str(known)):
        assert KEY not in shown
    data = pickle.dumps(chat)
    assert KEY.encode() not in data
    with pytest.raises(ServingError, match="answers 401"):
        pickle.loads(data).invoke(MESSAGES)
    monkeypatch.setenv("BLOCKATTN_RAG_API_KEY", KEY)
    assert pickle.loads(data).invoke(MESSAGES).content == text


def test_other_model_is_asked_with_the_same_key(serve: Serve, saved: str) -> None:
    server = serve(api_key=KEY)
    chat = remote(server.url, saved, api_key=KEY)
    either = chat.configurable_fields(model_name=ConfigurableField(id="model"))
    config: Any = {"configurable": {"model": "another-model"}}
    assert either.invoke(MESSAGES, config).content
    assert server.bodies(COMPLETIONS)[-1]["model"] == "another-model"


def test_cache_depends_on_server(server: FakeServer, chat: ChatBlockAttention, saved: str) -> None:
    cached = chat.model_copy(update={"cache": InMemoryCache()})
    assert cached.invoke(MESSAGES).content == cached.invoke(MESSAGES).content
    assert len(server.bodies(COMPLETIONS)) == 1
    other = remote("http://127.0.0.1:9", saved)
    assert chat._identifying_params != other._identifying_params


def test_what_a_server_has_itself_is_refused() -> None:
    for arguments in ({"kv_store": "kv"}, {"model_kwargs": {"device": "cuda"}}):
        with pytest.raises(ValueError, match="A server has its own model, device and store"):
            ChatBlockAttention(base_url="http://gpu:8000", **arguments)
    chat = ChatBlockAttention(base_url="http://gpu:8000")
    with pytest.raises(ValueError, match="Give either llm="):
        BlockKVTransformer(llm=chat, api_key=KEY)


@pytest.mark.parametrize("retries", [0, 2])
def test_max_retries_bounds_the_further_tries(
    server: FakeServer, saved: str, retries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockattn_rag.server.client.http._PAUSE_S", 0.0)
    chat = remote(server.url, saved, max_retries=retries, timeout=30)
    server.faults += [fault(RefusalError(503, "overloaded"))] * (1 + retries)
    with pytest.raises(ServingError, match="overloaded"):
        chat.invoke(MESSAGES)
    assert len(server.bodies(COMPLETIONS)) == 1 + retries


def test_a_copy_keeps_timeout_and_max_retries(server: FakeServer, saved: str) -> None:
    chat = remote(server.url, saved, timeout=7, max_retries=4)
    again = pickle.loads(pickle.dumps(chat))
    for one in (chat, again):
        assert one.model_kwargs == {"tokenizer": saved, "timeout_s": 7, "retries": 4}


def test_a_timeout_given_twice_is_refused(saved: str) -> None:
    twice = {"timeout": 7, "model_kwargs": {"tokenizer": saved, "timeout_s": 8}}
    with pytest.raises(ValueError, match="Found both timeout and model_kwargs"):
        remote("http://gpu:8000", saved, **twice)


def test_local_model_ignores_timeout_and_retries(local: BlockAttentionEngine) -> None:
    chat = ChatBlockAttention(engine=local, max_tokens=6, timeout=1, max_retries=0)
    assert chat.model_kwargs == {}
    assert chat.invoke("Which?").content
