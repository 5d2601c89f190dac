"""Service over an engine that only encodes blocks: recognized passages, encoding, and the index."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from starlette.datastructures import Headers

from blockattn_rag.errors import MissError, StoreError
from blockattn_rag.prompts.blocks import Span
from blockattn_rag.prompts.recognition import Entries, entries_of
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.protocol import EncodeBody
from blockattn_rag.server.vllm.routes import _read_chat, _read_completion
from blockattn_rag.server.vllm.service import IndexWriter, Service
from blockattn_rag.store import DirectoryStore, MemoryStore
from blockattn_rag.store.namespaces import OPEN
from blockattn_rag.store.passage_index import PassageIndex, folder_of
from tests_vllm.reference import MODEL, Reference
from tests_vllm.test_ensure import Client

STORED, STALE = (f"{name} Tower is 214 metres tall and green." for name in ("Halden", "Tove"))


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path / "kv")
    PassageIndex(store).add(entries_of([STORED, STALE]), "")
    return store


def service_of(
    reference: Reference, store: DirectoryStore, asked: list[Any] | None = None, **options: Any
) -> Service:
    """Return a service that has read the index, over an engine that only encodes blocks.

    Args:
        asked: List for the requests that reach vLLM's handlers.
    """

    async def create(request: Any, raw_request: Any) -> Any:
        if asked is not None:
            asked.append(request)
        return SimpleNamespace(model_dump=lambda: {"usage": {}})

    chat = SimpleNamespace(
        chat_template=None,
        chat_template_content_format="auto",
        default_chat_template_kwargs=None,
        exclude_tools_when_tool_choice_none=False,
        create_chat_completion=create,
    )
    models = SimpleNamespace(base_model_paths=[SimpleNamespace(name="m")], lora_requests={})
    state = SimpleNamespace(
        openai_serving_models=models,
        openai_serving_completion=SimpleNamespace(create_completion=create),
        openai_serving_chat=chat,
    )
    client: Any = Client(reference, store)
    client.model_config = SimpleNamespace(
        max_model_len=2048, tokenizer=MODEL, tokenizer_revision=None
    )
    backend = SimpleNamespace(backend="guidance")
    client.vllm_config = SimpleNamespace(structured_outputs_config=backend)
    given = reference.options(store=str(store.path), **{"recognize": True, **options})
    service = Service(client, state, ServingConfig.parse(given), reference.profile)
    assert service.passages is not None
    span = Span(STALE, "conversation")
    end = time.monotonic() + 30
    while service.passages.split([span], OPEN) == (span,):  # until the index is read
        assert time.monotonic() < end, "the index was not read in 30 seconds"
        time.sleep(0.01)
    return service


def answered(service: Service, body: dict[str, Any]) -> Any:
    raw_request = SimpleNamespace(headers=Headers())
    return asyncio.run(service.chat(*_read_chat(body), raw_request))["blockattn"]


def test_stale_index_entry_is_no_error(reference: Reference, store: DirectoryStore) -> None:
    ask = {"messages": [{"role": "user", "content": "How tall?"}], "documents": [{"text": STORED}]}
    plain = {"messages": [{"role": "user", "content": f"{STALE}\nHow tall?"}]}
    reader = service_of(reference, store, read_only=True)
    with pytest.raises(MissError):
        answered(reader, ask)
    answered(service_of(reference, store), ask)
    assert answered(reader, {**ask, **plain}) == {"mode": "block"}
    full = answered(reader, plain)
    assert full["mode"] == "full"
    assert "1 of 2 blocks are not stored" in full["reason"]


def test_completions_that_cannot_use_blocks_are_passed_to_vllm(
    reference: Reference, store: DirectoryStore
) -> None:
    asked: list[Any] = []
    reader = service_of(reference, store, asked, read_only=True)
    text = f"{STALE}\nHow tall?"
    request = _read_completion({"prompt": text})
    answer: Any = asyncio.run(reader.complete(*request, SimpleNamespace(headers=Headers())))
    assert "are not stored" in answer["blockattn"]["reason"]
    assert [one.prompt for one in asked] == [text]


def test_system_messages_are_searched_only_on_request(
    reference: Reference, store: DirectoryStore
) -> None:
    rules = {"role": "system", "content": f"Never say:\n{STORED}"}
    chat = {"messages": [rules, {"role": "user", "content": "How tall?"}]}
    assert answered(service_of(reference, store), chat) == {"mode": "full"}
    assert answered(service_of(reference, store, recognize="system"), chat)["mode"] == "block"


def test_reported_bytes_depend_on_the_dtype_of_stored_blocks(
    reference: Reference, store: DirectoryStore
) -> None:
    case = reference.case(30)
    service = service_of(reference, store, kv_dtype="int8")
    answer = asyncio.run(service.encode(EncodeBody(case.texts[1:-1]), Headers()))
    lengths = case.lengths[1:]
    assert answer.passages == ("encoded",) * len(lengths)
    assert answer.encoded_tokens == sum(lengths)
    assert answer.stored_bytes == sum(reference.profile.block_bytes(n, "int8") for n in lengths)


# -- the index -----------------------------------------------------------------------------------

ENTRIES = [entries_of([f"Passage {n} of a busy server, with enough characters."]) for n in range(6)]


def add_all(index: PassageIndex, *namespaces: str) -> int:
    """Add entries one by one. Returns the number of failed writes."""
    before = REGISTRY.get_sample_value("blockattn_index_failures_total") or 0.0

    async def run() -> None:
        writer = IndexWriter(index, every_s=3600)
        for entries in ENTRIES:
            for namespace in namespaces:
                writer.add(entries, namespace)
            await asyncio.sleep(0.01)

    asyncio.run(run())
    return int((REGISTRY.get_sample_value("blockattn_index_failures_total") or 0.0) - before)


def test_entries_are_written_in_few_files_and_completely_at_exit() -> None:
    store = MemoryStore(1 << 20)
    add_all(PassageIndex(store), "a", "b")
    for namespace in ("a", "b"):
        assert 1 <= len(store.sidecar.names(folder_of(namespace))) <= 2
        assert [PassageIndex(store).add(one, namespace) for one in ENTRIES] == [0] * 6


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (StoreError, "Cannot write the passage index: {} is full"),
        (MemoryError, "Unexpected error while writing the index: {} is full"),
    ],
)
def test_a_failed_write_is_logged_counted_and_retried(
    kind: type[Exception],
    message: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing, add = ["a", "b"], PassageIndex.add

    def add_or_fail(index: PassageIndex, entries: Entries, namespace: str) -> int:
        if namespace in failing:
            failing.remove(namespace)
            raise kind(f"{namespace} is full")
        return add(index, entries, namespace)

    monkeypatch.setattr(PassageIndex, "add", add_or_fail)
    store = MemoryStore(1 << 20)
    assert add_all(PassageIndex(store), "a", "b") == 2
    for namespace in ("a", "b"):
        assert message.format(namespace) in caplog.text
        assert [PassageIndex(store).add(one, namespace) for one in ENTRIES] == [0] * 6
