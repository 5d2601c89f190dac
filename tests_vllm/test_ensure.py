"""Missing blocks are encoded once for all requests, and never on read-only servers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from blockattn_rag.errors import (
    CorruptEntryError,
    MissError,
    ProtocolError,
    ServingError,
    StoreError,
)
from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED, Keep
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.plan import parse_plan
from blockattn_rag.server.vllm import ensure
from blockattn_rag.server.vllm.ensure import BlockEnsurer
from blockattn_rag.server.vllm.requests import Encodable, encodables
from blockattn_rag.server.vllm.scheduler import UNSAVED
from blockattn_rag.server.vllm.service import Service
from blockattn_rag.store import DirectoryStore
from blockattn_rag.store.concurrency import CircuitBreaker
from tests_vllm.reference import MODEL, Reference


class Client:
    """Engine client that stores encoded blocks, or ends requests for another reason."""

    def __init__(
        self,
        reference: Reference,
        store: DirectoryStore,
        reason: str = "length",
        unstored: str | None = None,
    ) -> None:
        self.reference, self.store, self.reason = reference, store, reason
        self.unstored = unstored
        self.encoding: list[str] = []
        self.asked: list[list[int]] = []
        self.at_once = self.most_at_once = 0
        self.kept: list[Keep] = []

    async def generate(
        self, prompt: dict[str, list[int]], sampling: Any, request_id: str
    ) -> AsyncGenerator[Any, None]:
        ids = prompt["prompt_token_ids"]
        if name := sampling.extra_args["kv_transfer_params"].get(UNSAVED):
            assert name in self.encoding
            yield SimpleNamespace(kv_transfer_params={UNSAVED: self.unstored})
            return
        self.encoding.append(request_id)
        plan = parse_plan(sampling.extra_args["kv_transfer_params"], len(ids))
        assert plan is not None
        self.asked.append(ids)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        self.kept += [keep for keep in plan.keep if keep != STORED]
        await asyncio.sleep(0.05)
        if self.reason == "length" and STORED in plan.keep and not self.unstored:
            self.store.put(self.reference.key(ids), self.reference.encoded(ids))
        self.at_once -= 1
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=self.reason)])


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "kv")


def ensurer_of(client: Client, **options: Any) -> BlockEnsurer:
    reference = client.reference
    config = ServingConfig.parse(reference.options(store=str(client.store.path), **options))
    return BlockEnsurer(client, client.store, config, reference.profile)


def blocks_of(reference: Reference) -> list[Encodable]:
    blocks = reference.case(1).blocks
    blocks, keep = [*blocks, blocks[1]], [STORED] * (len(blocks) + 1)
    return encodables(blocks, "", reference.profile, opens_prompt=True, keep=keep)


def test_a_block_is_encoded_once_for_concurrent_requests(
    reference: Reference, store: DirectoryStore
) -> None:
    client = Client(reference, store)
    ensurer, blocks = ensurer_of(client), blocks_of(reference)

    async def all_at_once() -> list[list[bool]]:
        return await asyncio.gather(*(ensurer.ensure(blocks) for _ in range(4)))

    assert asyncio.run(all_at_once()) == [[True] * len(blocks)] * 4
    assert len(client.asked) == len(blocks) - 1
    assert asyncio.run(ensurer_of(client).ensure(blocks)) == [False] * len(blocks)


def test_leaving_does_not_affect_other_waiters(reference: Reference, store: DirectoryStore) -> None:
    client = Client(reference, store)
    ensurer, blocks = ensurer_of(client), blocks_of(reference)

    async def one_leaves() -> list[bool]:
        first = asyncio.create_task(ensurer.ensure(blocks))
        while not client.asked:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ensurer.ensure(blocks))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert asyncio.run(one_leaves()) == [True] * len(blocks)
    assert len(client.asked) == len(blocks) - 1


def test_blocks_without_waiting_requests_are_not_encoded(
    reference: Reference, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensure, "_AT_ONCE", 1)
    client = Client(reference, store)
    ensurer, blocks = ensurer_of(client), blocks_of(reference)

    async def all_leave() -> list[bool]:
        first = asyncio.create_task(ensurer.ensure(blocks))
        while not client.asked:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0)
        return await ensurer.ensure(blocks[-1:])

    assert asyncio.run(all_leave()) == [True]
    assert len(client.asked) == 2  # the running request and the new one


def test_concurrent_encoding_is_limited_by_the_write_queue(
    reference: Reference, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(reference)
    longest = max(len(one.block.ids) for one in blocks)
    monkeypatch.setattr(ensure, "QUEUE_BYTES", longest * reference.profile.bytes_per_token)
    client = Client(reference, store)
    asyncio.run(ensurer_of(client).ensure(blocks))
    assert len(client.asked) == len(blocks) - 1
    assert client.most_at_once == 1


def test_nothing_is_encoded_for_an_unwritable_store(
    reference: Reference, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensure, "_STORED_WITHIN_S", 0.01)
    now, put = [0.0], store.put
    monkeypatch.setattr(store, "put", lambda _key, _kv: None)
    client = Client(reference, store)
    ensurer, blocks = ensurer_of(client), blocks_of(reference)
    ensurer._storing = CircuitBreaker(3, 30.0, clock=lambda: now[0])

    async def ask() -> list[bool]:
        for one in blocks[:3]:
            with pytest.raises(ServingError, match="not stored within"):
                await ensurer.ensure([one], must_store=True)
        told = len(client.asked)
        with pytest.raises(ServingError, match="Several blocks in a row could not be stored"):
            await ensurer.ensure(blocks[:1], must_store=True)
        assert len(client.asked) == told
        monkeypatch.setattr(store, "put", put)
        now[0] = 31.0
        return [*await ensurer.ensure(blocks[:1]), *await ensurer.ensure(blocks[1:2])]

    assert asyncio.run(ask()) == [True, True]


def test_with_a_full_store_blocks_are_kept_in_memory(
    reference: Reference, store: DirectoryStore
) -> None:
    client = Client(reference, store, unstored="No space left on device")
    ensurer, blocks = ensurer_of(client), blocks_of(reference)
    began = time.monotonic()
    assert asyncio.run(ensurer.ensure(blocks)) == [True] * len(blocks)
    assert time.monotonic() - began < 10
    assert client.kept == [IN_MEMORY] * (len(blocks) - 1)
    assert asyncio.run(ensurer.ensure(blocks)) == [False] * len(blocks)
    assert list(store.keys()) == []


def test_must_store_raises_the_reason(reference: Reference, store: DirectoryStore) -> None:
    client = Client(reference, store, unstored="No space left on device")
    ensurer, blocks = ensurer_of(client), blocks_of(reference)
    began = time.monotonic()
    for _ in range(2):  # the second time, nothing is attempted
        with pytest.raises(ServingError, match="not stored: No space left on device"):
            asyncio.run(ensurer.ensure(blocks, must_store=True))
    assert time.monotonic() - began < 10
    assert client.kept == []


def test_a_full_store_without_private_memory_is_an_error(
    reference: Reference, store: DirectoryStore
) -> None:
    client = Client(reference, store, unstored="No space left on device")
    ensurer = ensurer_of(client, private_memory="0")
    with pytest.raises(ServingError, match="not stored: No space left on device"):
        asyncio.run(ensurer.ensure(blocks_of(reference)))


def test_waiting_for_an_unresponsive_store_times_out(
    reference: Reference, store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensure, "_ANSWERED_WITHIN_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(store, "touch", lambda _key: answers.wait())
    try:
        with pytest.raises(StoreError, match="did not respond within"):
            asyncio.run(ensurer_of(Client(reference, store)).ensure(blocks_of(reference)))
    finally:
        answers.set()


def test_store_locations_are_logged_but_hidden_from_clients(
    reference: Reference,
    store: DirectoryStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def touch(key: str) -> bool:
        raise CorruptEntryError(f"{store.path}/{key} is damaged")

    monkeypatch.setattr(store, "touch", touch)
    with (
        caplog.at_level(logging.WARNING, "blockattn_rag"),
        pytest.raises(CorruptEntryError, match="see the server's log") as raised,
    ):
        asyncio.run(ensurer_of(Client(reference, store)).ensure(blocks_of(reference)))
    assert str(store.path) not in str(raised.value)
    assert f"{store.path}/" in caplog.text


def test_a_read_only_server_reports_missing_blocks(
    reference: Reference, store: DirectoryStore
) -> None:
    client = Client(reference, store)
    blocks = blocks_of(reference)
    with pytest.raises(MissError, match=f"{len(blocks) - 1} of {len(blocks)} blocks"):
        asyncio.run(ensurer_of(client, read_only=True).ensure(blocks))
    assert client.asked == []


def test_encoding_errors_are_reported(reference: Reference, store: DirectoryStore) -> None:
    client = Client(reference, store, reason="error")
    with pytest.raises(ServingError, match="finish reason 'error'"):
        asyncio.run(ensurer_of(client).ensure(blocks_of(reference)))


def kept_of(reference: Reference, *keep: Keep) -> list[Encodable]:
    return encodables(
        reference.case(1).blocks[: len(keep)], "", reference.profile, opens_prompt=True, keep=keep
    )


def test_a_read_only_server_encodes_for_its_memory(
    reference: Reference, store: DirectoryStore
) -> None:
    client = Client(reference, store)
    ensurer = ensurer_of(client, read_only=True)
    blocks = kept_of(reference, IN_MEMORY, PRIVATE, PRIVATE)
    for encoded in (True, False):
        assert asyncio.run(ensurer.ensure(blocks)) == [encoded] * 3
    assert client.kept == [IN_MEMORY, PRIVATE, PRIVATE]
    assert list(store.keys()) == []
    # After a failed load, the blocks count as lost by the workers.
    assert asyncio.run(ensurer.ensure(blocks, thorough=True)) == [True] * 3


def test_stored_blocks_are_not_used_as_private_blocks(
    reference: Reference, store: DirectoryStore
) -> None:
    blocks = kept_of(reference, IN_MEMORY, PRIVATE)
    for one in kept_of(reference, STORED, STORED):
        store.put(one.key, reference.encoded(one.token_ids))
    client = Client(reference, store)
    for thorough in (False, True):
        found = asyncio.run(ensurer_of(client).ensure(blocks, thorough=thorough))
        assert found == [False, True]
    assert client.kept == [PRIVATE] * 2


def test_a_block_in_memory_is_stored_later(reference: Reference, store: DirectoryStore) -> None:
    client = Client(reference, store)
    ensurer = ensurer_of(client)
    assert asyncio.run(ensurer.ensure(kept_of(reference, IN_MEMORY))) == [True]
    (block,) = kept_of(reference, STORED)

    async def ensure_and_wait() -> list[bool]:
        encoded = await ensurer.ensure([block])
        assert block.key not in store, "expected the answer not to wait for the store"
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return encoded

    assert asyncio.run(ensure_and_wait()) == [False]
    assert block.key in store
    assert client.kept == [IN_MEMORY]
    assert len(client.asked) == 2


def test_a_read_only_server_stores_nothing(reference: Reference, store: DirectoryStore) -> None:
    client = Client(reference, store)
    ensurer = ensurer_of(client, read_only=True)
    assert asyncio.run(ensurer.ensure(kept_of(reference, IN_MEMORY))) == [True]
    assert asyncio.run(ensurer.ensure(kept_of(reference, STORED))) == [False]
    assert len(client.asked) == 1
    with pytest.raises(MissError):
        asyncio.run(ensurer.ensure(kept_of(reference, STORED), thorough=True))


def test_too_many_blocks_are_refused_before_encoding(
    reference: Reference, store: DirectoryStore
) -> None:
    client = Client(reference, store)
    blocks = kept_of(reference, PRIVATE, PRIVATE)
    room = sum(one.tokens for one in blocks) * reference.profile.bytes_per_token
    with pytest.raises(ProtocolError, match="raise private_memory"):
        asyncio.run(ensurer_of(client, private_memory=str(room - 1)).ensure(blocks))
    assert client.asked == []
    ensurer = ensurer_of(client, private_memory=str(room))
    assert asyncio.run(ensurer.ensure([*blocks, *blocks])) == [True] * 4


@pytest.mark.parametrize("connector", [None, "NixlConnector", "MultiConnector"])
def test_the_endpoints_need_the_connector(connector: str | None) -> None:
    transfer = connector and SimpleNamespace(kv_connector=connector)
    client = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))
    with pytest.raises(ServingError, match="requires the connector BlockAttentionConnector"):
        Service.of(client, SimpleNamespace())


@pytest.mark.parametrize(
    ("changed", "is_refused"),
    [
        ({}, True),
        ({"data_parallel_size_local": 1, "local_engines_only": True}, False),
        ({"data_parallel_size_local": 2, "local_engines_only": True}, True),
        ({"data_parallel_size": 1}, False),
    ],
)
def test_several_engines_keep_no_private_blocks(
    reference: Reference, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], is_refused: bool
) -> None:
    parallel = {"data_parallel_size": 4, "data_parallel_size_local": 4, "local_engines_only": False}
    options = reference.options()
    transfer = SimpleNamespace(
        kv_connector="BlockAttentionConnector", kv_connector_extra_config=options
    )
    config = SimpleNamespace(
        kv_transfer_config=transfer, parallel_config=SimpleNamespace(**parallel | changed)
    )
    model = SimpleNamespace(model=MODEL, dtype=torch.float32, revision=None)
    client = SimpleNamespace(vllm_config=config, model_config=model)
    monkeypatch.setattr(Service, "__init__", lambda *_: None)
    with pytest.raises(ServingError, match="private_memory '0'") if is_refused else nullcontext():
        Service.of(client, SimpleNamespace())
    options["private_memory"] = "0"
    assert Service.of(client, SimpleNamespace())
