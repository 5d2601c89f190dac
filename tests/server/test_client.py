"""``ServerClient``, and the LLMs and ingestion steps that use it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document as LangChainDocument
from langchain_core.messages import HumanMessage, SystemMessage
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms.mock import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.prompts.default_prompts import DEFAULT_TEXT_QA_PROMPT
from llama_index.core.schema import TextNode

import blockattn_rag.langchain as langchain
import blockattn_rag.llama_index as llama_index
from blockattn_rag import ServerClient
from blockattn_rag.errors import MissError, ServingError
from blockattn_rag.prompts.blocks import Block, BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE, CHAT, Passage
from blockattn_rag.prompts.markers import wrap
from blockattn_rag.server.client import server_url
from blockattn_rag.server.protocol import ENCODE, INFO
from tests.engines import tuned_model
from tests.fake_server import CHATS, COMPLETIONS, FakeServer, RefusalError
from tests.models import tiny_tokenizer

TEXTS = ["Halden Tower is 214 metres tall.", " Tove Lind built it. ", "The lake is deep."]
KEY = "the-secret"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fake = FakeServer(tuned_model(), api_key=KEY)
    with fake.listening():
        yield fake


@pytest.fixture
def client(server: FakeServer) -> ServerClient:
    return ServerClient(server.url, KEY, retries=1)


def test_info_describes_the_server(server: FakeServer, client: ServerClient) -> None:
    assert client.info.to_dict() == server.info
    assert client.info.models == ("the-model",)
    assert len(server.bodies(INFO)) == 1, "expected one request"


def test_passages_are_encoded_once_and_found(server: FakeServer, client: ServerClient) -> None:
    ticks: list[tuple[int, int]] = []
    first = client.encode([*TEXTS, TEXTS[0]], on_progress=lambda *tick: ticks.append(tick))
    again = client.encode(TEXTS)
    assert (first.computed, first.reused, again.computed, again.reused) == (3, 0, 0, 3)
    assert first.computed_tokens > 0 < first.stored_bytes
    assert ticks[-1] == (sum(len(text.strip()) for text in TEXTS),) * 2
    assert all(server.engine.contains(Block(text.strip(), BLANK_LINE)) for text in TEXTS)
    assert client.is_stored(TEXTS[1])
    assert not client.is_stored("Another one.")


def test_many_passages_take_several_requests(server: FakeServer, client: ServerClient) -> None:
    assert client.encode([f"Passage {number}." for number in range(70)]).computed == 70
    assert [len(body["texts"]) for body in server.bodies(ENCODE)].count(32) == 2


@pytest.mark.parametrize("mode", ["block", "full"])
def test_answers_equal_the_engines(server: FakeServer, client: ServerClient, mode: Any) -> None:
    pieces: list[str] = []
    reason, stats = client.ask("How tall?", TEXTS, mode=mode, take=pieces.append, max_tokens=8)
    tokenizer = server.engine.model.tokenizer.tokenizer
    prompt = CHAT.prompt("How tall?", [Passage("", text) for text in TEXTS], tokenizer)
    expected = server.engine.generate(prompt, mode=mode, max_new_tokens=8, temperature=0.0)
    assert "".join(pieces) == expected.text
    assert reason == expected.finish_reason
    assert (stats.mode, stats.generated_tokens) == (mode, expected.stats.generated_tokens)
    if mode == "block":
        assert stats.misses >= len(TEXTS)
        assert stats.prompt_tokens == expected.stats.prompt_tokens


def test_models_without_a_chat_template_answer_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with FakeServer(tuned_model(tokenizer)).listening() as server:
        client, pieces = ServerClient(server.url), list[str]()
        client.ask("How tall?", TEXTS, take=pieces.append, max_tokens=8)
        _, stats = client.ask("How tall?", TEXTS, max_tokens=8)
        assert len(server.bodies(COMPLETIONS)) == 2
        assert (stats.mode, stats.misses) == ("block", 0)
        assert stats.hits >= len(TEXTS)
        assert pieces


def test_temporary_failures_are_retried(server: FakeServer, client: ServerClient) -> None:
    server.faults.append(RefusalError(503, "busy"))
    assert client.encode(TEXTS).computed == 3
    server.faults += [RefusalError(503, "busy"), RefusalError(503, "still busy")]
    with pytest.raises(ServingError, match=r"returned status 503: still busy"):
        client.encode(["Another one."])


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (RefusalError(409, "not stored"), MissError, "returned status 409: not stored"),
        (
            RefusalError(404, "no"),
            ServingError,
            "has no .*: this package's connector and endpoints",
        ),
        (RefusalError(400, "bad"), ServingError, "returned status 400: bad"),
    ],
)
def test_refusals_are_reported_with_the_reason(
    server: FakeServer, client: ServerClient, fault: Exception, kind: type, message: str
) -> None:
    server.faults.append(fault)
    with pytest.raises(kind, match=message):
        client.encode(TEXTS)


def test_a_wrong_key_is_reported_without_showing_it(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ServingError, match="set BLOCKATTN_RAG_API_KEY") as refused:
        ServerClient(server.url, "wrong-key").encode(TEXTS)
    assert "wrong-key" not in str(refused.value)
    monkeypatch.setenv("BLOCKATTN_RAG_API_KEY", KEY)
    assert ServerClient(server.url).info.models
    with pytest.raises(ValueError, match="Invalid API key") as invalid:
        ServerClient(server.url, "a b")
    assert "a b" not in str(invalid.value)


def test_an_unreachable_server_is_reported() -> None:
    with pytest.raises(ServingError, match=r"Cannot reach http://127\.0\.0\.1:9"):
        _ = ServerClient("http://127.0.0.1:9", retries=0).info


def test_another_protocol_version_is_reported(server: FakeServer, client: ServerClient) -> None:
    server.info["v"] = 99
    with pytest.raises(ServingError, match="Found version 99 of info"):
        _ = client.info


@pytest.mark.parametrize(
    "url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/blockattn/openai/v1/"]
)
def test_addresses_with_and_without_a_path_are_equivalent(url: str) -> None:
    assert server_url(url) == "http://h:1"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gpu:8000", "Invalid server address"),
        ("http://h:99999", "Invalid server address"),
        ("http://me:pw@h", "contains a user name or password"),
        ("http://h?x=1", "Invalid server address"),
    ],
)
def test_invalid_addresses_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ServerClient(url)


@pytest.mark.parametrize("adapter", [llama_index, langchain])
def test_a_server_with_another_marker_key_is_refused(server: FakeServer, adapter: Any) -> None:
    server.info["marker_key"] = "0" * 16
    with pytest.raises(ServingError, match="BLOCKATTN_RAG_MARKER_KEY to the same value"):
        adapter.served_llm(server.url, api_key=KEY)


# -- LlamaIndex ------------------------------------------------------------------------------------


def test_llama_index_reuses_passages_on_a_server(server: FakeServer) -> None:
    llm = llama_index.served_llm(server.url, api_key=KEY, tokenizer=tiny_tokenizer(), max_tokens=8)
    transform = llama_index.BlockKVTransform(llm=llm)
    documents = [Document(text=text.strip()) for text in TEXTS]
    nodes = IngestionPipeline(transformations=[SentenceSplitter(), transform]).run(
        documents=documents
    )
    assert transform.stats is not None
    assert transform.stats.computed == 3
    index = VectorStoreIndex(nodes, embed_model=llama_index.HashingEmbedding())
    engine = llama_index.block_query_engine(index, llm, similarity_top_k=2)
    response = engine.query("How tall is Halden Tower?")
    body = server.bodies(CHATS)[-1]
    assert wrap(TEXTS[0]) in body["messages"][-1]["content"]
    report = server.generation(CHATS, body)[1]
    assert (report["mode"], report["misses"]) == ("block", 0)
    assert str(response) == server.generation(CHATS, body)[0].text


def test_configure_packs_complete_passages_for_a_server(server: FakeServer) -> None:
    llm = llama_index.served_llm(
        server.url, api_key=KEY, tokenizer=tiny_tokenizer(), max_tokens=8, context_window=900
    )
    before = Settings._llm, Settings._prompt_helper
    try:
        llama_index.configure(llm)
        assert Settings.llm is llm
        helper = Settings.prompt_helper
        texts = [wrap(f"Passage {number}: " + "word " * 30) for number in range(8)]
        chunks = helper.repack(DEFAULT_TEXT_QA_PROMPT, texts, llm=llm)
        assert len(chunks) > 1
        assert sum(chunk.count("[[kvblock:") for chunk in chunks) == len(texts)
    finally:
        Settings._llm, Settings._prompt_helper = before
    with pytest.raises(TypeError, match="found MockLLM, which does not keep blocks complete"):
        llama_index.configure(MockLLM())


def test_passages_stay_complete_for_a_server_without_a_chat_template(server: FakeServer) -> None:
    server.info["has_chat_template"] = False
    llm = llama_index.served_llm(
        server.url, api_key=KEY, tokenizer=tiny_tokenizer(chat=False), max_tokens=8,
        context_window=900,
    )  # fmt: skip
    helper = llama_index.BlockPromptHelper.from_llm(llm)
    texts = [wrap(f"Passage {number}: " + "word " * 30) for number in range(8)]
    chunks = helper.repack(DEFAULT_TEXT_QA_PROMPT, texts, llm=llm)
    assert [chunk.count("[[/kvblock:") for chunk in chunks] == [4, 4]
    cut, _, end = texts[0].partition(" word word")
    llm.predict(DEFAULT_TEXT_QA_PROMPT, context_str=cut, query_str="Which?")
    closing = end[end.index("[[") :]
    assert cut + closing in server.bodies(COMPLETIONS)[-1]["prompt"]


def test_transform_of_a_server_can_be_copied_and_pickled_without_the_key(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = llama_index.BlockKVTransform(server=server.url, api_key=KEY)
    monkeypatch.setenv("BLOCKATTN_RAG_API_KEY", KEY)
    data = pickle.dumps(transform)
    assert KEY.encode() not in data
    for other in (pickle.loads(data), copy.deepcopy(transform)):
        (node,) = other([TextNode(text=TEXTS[0])])
        assert node.metadata["kv_handle"]
    stored = transform.to_dict()
    assert stored["fingerprint"] == server.info["fingerprint"]
    assert (stored["store"], stored["server"]) == (server.url, server.url)
    assert KEY not in str(stored)
    again = llama_index.BlockKVTransform.from_dict(stored)
    assert again.server == server.url


STEPS = [(llama_index, "BlockKVTransform"), (langchain, "BlockKVTransformer")]


@pytest.mark.parametrize(("adapter", "name"), STEPS)
def test_ingestion_steps_take_several_servers_and_a_journal(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Any, name: str
) -> None:
    monkeypatch.setenv("BLOCKATTN_RAG_API_KEY", KEY)
    is_llama = adapter is llama_index
    items = [TextNode(text=text) if is_llama else LangChainDocument(text) for text in TEXTS]
    with FakeServer(tuned_model(), server.engine.store, api_key=KEY).listening() as second:
        urls = ["http://127.0.0.1:9", server.url, second.url]
        step = getattr(adapter, name)(server=urls, journal=tmp_path)
        for copied in (step, pickle.loads(pickle.dumps(step))):
            nodes = copied(items) if is_llama else copied.transform_documents(items)
            assert all(node.metadata["kv_handle"] for node in nodes)
            assert (copied.server, copied.journal) == (urls, str(tmp_path))
        assert (step.stats.computed, copied.stats.reused) == (3, 3)
        bodies = server.bodies(ENCODE) + second.bodies(ENCODE)
        assert [body["only_look"] for body in bodies].count(False) == 1


@pytest.mark.parametrize(("adapter", "name"), STEPS)
def test_ingestion_takes_a_server_or_a_model(server: FakeServer, adapter: Any, name: str) -> None:
    step = getattr(adapter, name)
    with pytest.raises(ValueError, match="pass server= without kv_store"):
        step(server=server.url, kv_store="kv")
    with pytest.raises(ValueError, match="api_key= requires server="):
        step(model_name="bundled", api_key=KEY)
    with pytest.raises(ValueError, match="journal= requires server="):
        step(model_name="bundled", journal="journal")
    with pytest.raises(ValueError, match="Expected at least one server"):
        step(server=[])
    with pytest.raises(TypeError, match="or a server address as server="):
        step(llm="http://gpu:8000")
    other = step(server=server.url, api_key=KEY, block_template=BlockTemplate("<", ">"))
    node = TextNode(text="x") if adapter is llama_index else LangChainDocument("x")
    with pytest.raises(ValueError, match="servers use"):
        other([node]) if adapter is llama_index else other.transform_documents([node])


# -- LangChain -------------------------------------------------------------------------------------


def test_langchain_reuses_passages_on_a_server(server: FakeServer) -> None:
    chat = langchain.served_llm(server.url, api_key=KEY, max_tokens=8)
    step = langchain.BlockKVTransformer(server=server.url, api_key=KEY)
    documents = step.transform_documents([LangChainDocument(text) for text in TEXTS])
    assert step.stats is not None
    assert step.stats.computed == 3
    assert KEY not in repr(step) + repr(chat)
    messages = [
        SystemMessage("Context:\n" + langchain.format_blocks(documents)),
        HumanMessage("How tall is Halden Tower?"),
    ]
    first, answer = chat.invoke(messages), chat.invoke(messages)
    assert first.content == answer.content
    expected, report = server.generation(CHATS, server.bodies(CHATS)[-1])
    assert answer.content == expected.text
    assert report["misses"] == 0
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] == report["reused_tokens"]
    assert "".join(str(chunk.content) for chunk in chat.stream(messages)) == expected.text


def test_an_invalid_address_does_not_show_the_key() -> None:
    with pytest.raises(ValueError, match="Invalid server address") as refused:
        langchain.BlockKVTransformer(server="gpu:8000", api_key=KEY)
    assert KEY not in str(refused.value)


def test_chat_models_need_a_chat_template(server: FakeServer) -> None:
    server.info["has_chat_template"] = False
    with pytest.raises(ServingError, match="has no chat template"):
        langchain.served_llm(server.url, api_key=KEY)
    assert not llama_index.served_llm(server.url, api_key=KEY).is_chat_model
