"""LlamaIndex's classes with a server's address do what they do with a model of this process."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.schema import TextNode
from llama_index_instrumentation import get_dispatcher

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.errors import ServingError
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVTransform,
    BlockReuseEvent,
    HashingEmbedding,
    block_query_engine,
    configure,
    encode_prompt_head,
)
from blockattn_rag.prompts.markers import wrap
from tests.server.client.conftest import Serve
from tests.server.client.fake_server import FakeServer

KEY = "the-secret"
NODES = [TextNode(text=f"Tower {n} is {100 + n} metres tall.", id_=f"n{n}") for n in range(4)]
MESSAGES = [
    ChatMessage(role="system", content="Answer briefly."),
    ChatMessage(role="user", content=f"{wrap('A passage.')}\n\n{wrap('Another one.')}\n\nWhich?"),
]


def remote(url: str, tokenizer: str, **options: Any) -> BlockAttentionLLM:
    return BlockAttentionLLM(
        "the-model",
        tokenizer_name=tokenizer,
        api_base=f"{url}/v1",
        **{"max_new_tokens": 6, **options},
    )


@pytest.fixture
def llm(server: FakeServer, saved: str) -> BlockAttentionLLM:
    return remote(server.url, saved)


@pytest.fixture
def here(local: BlockAttentionEngine) -> BlockAttentionLLM:
    """The measure: the same class over a model of this process."""
    return BlockAttentionLLM(engine=local, max_new_tokens=6)


def without_times(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if not name.endswith("_s")}


def events_of(ask: Any) -> tuple[Any, list[BlockReuseEvent]]:
    """What a call returns, and the events that it dispatched."""
    seen: list[BlockReuseEvent] = []

    class Handler(BaseEventHandler):
        def handle(self, event: Any, **kwargs: Any) -> None:
            if isinstance(event, BlockReuseEvent):
                seen.append(event)

    root, handler = get_dispatcher(), Handler()
    root.add_event_handler(handler)
    try:
        return ask(), seen
    finally:
        root.event_handlers.remove(handler)


def streamed(llm: BlockAttentionLLM) -> Any:
    return [*llm.stream_chat(MESSAGES)][-1]


def achat(llm: BlockAttentionLLM) -> Any:
    return asyncio.run(llm.achat(MESSAGES))


def astreamed(llm: BlockAttentionLLM) -> Any:
    async def read() -> Any:
        return [step async for step in await llm.astream_chat(MESSAGES)][-1]

    return asyncio.run(read())


@pytest.mark.parametrize("ask", [lambda llm: llm.chat(MESSAGES), streamed, achat, astreamed])
def test_chat_equals_local(llm: BlockAttentionLLM, here: BlockAttentionLLM, ask: Any) -> None:
    for _ in range(2):  # computed, then reused
        (found, events), (expected, local_events) = (
            events_of(lambda one=one: ask(one)) for one in (llm, here)
        )
        assert found.message.content == expected.message.content
        assert without_times(found.raw["usage"]) == without_times(expected.raw["usage"])
        assert found.raw["finish_reason"] == expected.raw["finish_reason"]
        assert len(events) == len(local_events) == 1
        assert without_times(events[0].model_dump()).keys() == (
            without_times(local_events[0].model_dump()).keys()
        )
    assert found.raw["usage"]["misses"] == 0


def test_completions_are_the_same(llm: BlockAttentionLLM, here: BlockAttentionLLM) -> None:
    for prompt in ("Hello", f"{wrap('A passage.')} Which?"):
        assert llm.complete(prompt).text == here.complete(prompt).text
        pieces = [step.delta for step in llm.stream_complete(prompt)]
        assert "".join(pieces) == here.complete(prompt).text


def test_a_query_engine_ingests_and_answers_through_the_server(
    server: FakeServer, llm: BlockAttentionLLM, here: BlockAttentionLLM
) -> None:
    answers = []
    for one in (llm, here):
        transform = BlockKVTransform(llm=one)
        nodes = IngestionPipeline(transformations=[transform]).run(nodes=[*NODES])
        assert transform.stats is not None
        assert transform.stats.computed == 4
        index = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
        encode_prompt_head(one)
        query_engine = block_query_engine(index, one, similarity_top_k=2)
        answer, (event,) = events_of(lambda engine=query_engine: engine.query("How tall is 2?"))
        assert event.misses == 0
        assert event.hits == 3
        answers.append(str(answer))
    assert answers[0] == answers[1]


def test_the_context_window_is_what_the_server_takes(serve: Serve, saved: str) -> None:
    server = serve(max_tokens=1234)
    llm = remote(server.url, saved)
    assert server.requests == []  # nothing is asked before it is needed
    assert llm.tokenize("abc") == remote(server.url, saved).tokenize("abc")
    assert llm.metadata.context_window == 1234
    configure(llm)
    assert remote("http://127.0.0.1:9", saved, context_window=99).metadata.context_window == 99


def test_an_ingestion_that_was_cached_is_of_one_server(server: FakeServer, saved: str) -> None:
    transform = BlockKVTransform(llm=remote(server.url, saved))
    told = transform.to_dict()
    assert told["store"] == server.url
    assert told["fingerprint"] == server.profile.fingerprint
    assert BlockKVTransform.from_dict(told).to_dict() == told


def test_pickle_has_no_key(serve: Serve, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(api_key=KEY)
    llm = remote(server.url, saved, api_key=KEY)
    text = llm.complete("Hi").text
    transform = BlockKVTransform(llm=llm)
    transform(NODES)
    for shown in (repr(llm), str(llm), llm.to_json(), str(llm.to_payload()), repr(transform)):
        assert KEY not in shown
    data = pickle.dumps([llm, transform])
    assert KEY.encode() not in data
    again, transform = pickle.loads(data)
    with pytest.raises(ServingError, match=r"answers 401.*BLOCKATTN_RAG_API_KEY"):
        again.complete("Hi")
    monkeypatch.setenv("BLOCKATTN_RAG_API_KEY", KEY)
    again, transform = pickle.loads(data)
    assert again.complete("Hi").text == text
    transform(NODES)
    assert transform.stats.reused == 4


@pytest.mark.parametrize("arguments", [{"kv_store": "kv"}, {"device_map": "cuda"}])
def test_what_a_server_has_itself_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="A server has its own model, device and store"):
        BlockAttentionLLM(api_base="http://gpu:8000", **arguments)


def test_the_source_must_be_one(llm: BlockAttentionLLM) -> None:
    with pytest.raises(ValueError, match="found both"):
        BlockAttentionLLM(engine=llm.engine, api_base="http://gpu:8000")
    with pytest.raises(ValueError, match="either llm="):
        BlockKVTransform(llm=llm, api_base="http://gpu:8000")


def test_arguments_of_the_engine_go_into_model_kwargs(server: FakeServer, saved: str) -> None:
    llm = remote(server.url, saved, model_kwargs={"retries": 0})
    with pytest.raises(TypeError, match="timeout"):
        _ = remote(server.url, saved, model_kwargs={"timeout": 1}).engine
    assert llm.complete("Hi").text
