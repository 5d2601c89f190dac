"""Missing blocks are encoded once for all requests, and never on read-only servers."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import nullcontext
from itertools import chain
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
from blockattn_rag.server.keys import BlockId, block_keys
from blockattn_rag.server.plan import BlockPlan, parse_plan
from blockattn_rag.server.vllm import ensure
from blockattn_rag.server.vllm.ensure import BlockEnsurer, KeptBlocks
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


@pytest.fixture
def client(reference: Reference, store: DirectoryStore) -> Client:
    return Client(reference, store)


@pytest.fixture
def full_client(reference: Reference, store: DirectoryStore) -> Client:
    """Client of an engine whose store is full."""
    return Client(reference, store, unstored="No space left on device")


@pytest.fixture
def blocks(reference: Reference) -> list[BlockId]:
    """Blocks of a prompt that repeats its first passage."""
    blocks = reference.case(1).blocks
    return ids_of(reference, [*blocks, blocks[1]], [STORED] * (len(blocks) + 1))


def ids_of(
    reference: Reference, blocks: Sequence[list[int]], keep: Sequence[Keep]
) -> list[BlockId]:
    plan = BlockPlan("complete", tuple(map(len, blocks)), keep=tuple(keep))
    return block_keys([*chain.from_iterable(blocks)], plan, reference.profile)


def ensurer_of(client: Client, **options: Any) -> BlockEnsurer:
    reference = client.reference
    config = ServingConfig.parse(reference.options(store=str(client.store.path), **options))
    return BlockEnsurer(client, client.store, config, reference.profile)


def sizes(blocks: Sequence[BlockId]) -> dict[str, int]:
    return {block.key: block.tokens for block in blocks}


def test_a_block_is_encoded_once_for_concurrent_requests(
    client: Client, blocks: list[BlockId]
) -> None:
    ensurer = ensurer_of(client)

    async def all_at_once() -> list[dict[str, int]]:
        return await asyncio.gather(*(ensurer.ensure(blocks) for _ in range(4)))

    assert asyncio.run(all_at_once()) == [sizes(blocks)] * 4
    assert len(client.asked) == len(blocks) - 1
    assert asyncio.run(ensurer_of(client).ensure(blocks)) == {}


def test_leaving_does_not_affect_other_waiters(client: Client, blocks: list[BlockId]) -> None:
    ensurer = ensurer_of(client)

    async def one_leaves() -> dict[str, int]:
        first = asyncio.create_task(ensurer.ensure(blocks))
        while not client.asked:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(ensurer.ensure(blocks))
        await asyncio.sleep(0.01)
        first.cancel()
        return await second

    assert asyncio.run(one_leaves()) == sizes(blocks)
    assert len(client.asked) == len(blocks) - 1


def test_blocks_without_waiting_requests_are_not_encoded(
    client: Client, blocks: list[BlockId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensure, "_AT_ONCE", 1)
    ensurer = ensurer_of(client)

    async def all_leave() -> dict[str, int]:
        first = asyncio.create_task(ensurer.ensure(blocks))
        while not client.asked:
            await asyncio.sleep(0.001)
        first.cancel()
        await asyncio.wait([first])
        await asyncio.sleep(0)
        return await ensurer.ensure(blocks[-1:])

    assert asyncio.run(all_leave()) == sizes(blocks[-1:])
    assert len(client.asked) == 2  # the running request and the new one


def test_concurrent_encoding_is_limited_by_the_write_queue(
    reference: Reference, client: Client, blocks: list[BlockId], monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(one.ids) for one in blocks)
    monkeypatch.setattr(ensure, "QUEUE_BYTES", longest * reference.profile.bytes_per_token)
    asyncio.run(ensurer_of(client).ensure(blocks))
    assert len(client.asked) == len(blocks) - 1
    assert client.most_at_once == 1


def test_nothing_is_encoded_for_an_unwritable_store(
    store: DirectoryStore, client: Client, blocks: list[BlockId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensure, "_STORED_WITHIN_S", 0.01)
    now, put = [0.0], store.put
    monkeypatch.setattr(store, "put", lambda _key, _kv: None)
    ensurer = ensurer_of(client)
    ensurer._storing = CircuitBreaker(3, 30.0, clock=lambda: now[0])

    async def ask() -> dict[str, int]:
        for one in blocks[:3]:
            with pytest.raises(ServingError, match="not stored within"):
                await ensurer.ensure([one], must_store=True)
        asked = len(client.asked)
        with pytest.raises(ServingError, match="Several blocks in a row could not be stored"):
            await ensurer.ensure(blocks[:1], must_store=True)
        assert len(client.asked) == asked
        monkeypatch.setattr(store, "put", put)
        now[0] = 31.0
        return await ensurer.ensure(blocks[:1]) | await ensurer.ensure(blocks[1:2])

    assert asyncio.run(ask()) == sizes(blocks[:2])


def test_with_a_full_store_blocks_are_kept_in_memory(
    store: DirectoryStore, full_client: Client, blocks: list[BlockId]
) -> None:
    ensurer = ensurer_of(full_client)
    began = time.monotonic()
    assert asyncio.run(ensurer.ensure(blocks)) == sizes(blocks)
    assert time.monotonic() - began < 10
    assert full_client.kept == [IN_MEMORY] * (len(blocks) - 1)
    assert asyncio.run(ensurer.ensure(blocks)) == {}
    assert list(store.keys()) == []


def test_must_store_raises_the_reason(full_client: Client, blocks: list[BlockId]) -> None:
    ensurer = ensurer_of(full_client)
    began = time.monotonic()
    for _ in range(2):  # the second time, nothing is attempted
        with pytest.raises(ServingError, match="not stored: No space left on device"):
            asyncio.run(ensurer.ensure(blocks, must_store=True))
    assert time.monotonic() - began < 10
    assert full_client.kept == []


def test_a_full_store_without_private_memory_is_an_error(
    full_client: Client, blocks: list[BlockId]
) -> None:
    ensurer = ensurer_of(full_client, private_memory="0")
    with pytest.raises(ServingError, match="not stored: No space left on device"):
        asyncio.run(ensurer.ensure(blocks))


def test_waiting_for_an_unresponsive_store_times_out(
    store: DirectoryStore, client: Client, blocks: list[BlockId], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ensure, "_ANSWERED_WITHIN_S", 0.01)
    answers = threading.Event()
    monkeypatch.setattr(store, "touch", lambda _key: answers.wait())
    try:
        with pytest.raises(StoreError, match="did not respond within"):
            asyncio.run(ensurer_of(client).ensure(blocks))
    finally:
        answers.set()


def test_store_locations_are_logged_but_hidden_from_clients(
    store: DirectoryStore,
    client: Client,
    blocks: list[BlockId],
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
        asyncio.run(ensurer_of(client).ensure(blocks))
    assert str(store.path) not in str(raised.value)
    assert f"{store.path}/" in caplog.text


def test_a_read_only_server_reports_missing_blocks(client: Client, blocks: list[BlockId]) -> None:
    with pytest.raises(MissError, match=f"{len(blocks) - 1} of {len(blocks)} blocks"):
        asyncio.run(ensurer_of(client, read_only=True).ensure(blocks))
    assert client.asked == []


def test_encoding_errors_are_reported(
    reference: Reference, store: DirectoryStore, blocks: list[BlockId]
) -> None:
    client = Client(reference, store, reason="error")
    with pytest.raises(ServingError, match="finish reason 'error'"):
        asyncio.run(ensurer_of(client).ensure(blocks))


def kept_of(reference: Reference, *keep: Keep) -> list[BlockId]:
    return ids_of(reference, reference.case(1).blocks[: len(keep)], keep)


def test_a_read_only_server_encodes_for_its_memory(
    reference: Reference, store: DirectoryStore, client: Client
) -> None:
    ensurer = ensurer_of(client, read_only=True)
    blocks = kept_of(reference, IN_MEMORY, PRIVATE, PRIVATE)
    assert asyncio.run(ensurer.ensure(blocks)) == sizes(blocks)
    assert asyncio.run(ensurer.ensure(blocks)) == {}
    assert client.kept == [IN_MEMORY, PRIVATE, PRIVATE]
    assert list(store.keys()) == []
    # After a failed load, the blocks count as lost by the workers.
    assert asyncio.run(ensurer.ensure(blocks, thorough=True)) == sizes(blocks)


def test_stored_blocks_are_not_used_as_private_blocks(
    reference: Reference, store: DirectoryStore, client: Client
) -> None:
    blocks = kept_of(reference, IN_MEMORY, PRIVATE)
    for one in kept_of(reference, STORED, STORED):
        store.put(one.key, reference.encoded([*one.ids]))
    for thorough in (False, True):
        found = asyncio.run(ensurer_of(client).ensure(blocks, thorough=thorough))
        assert found == sizes(blocks[1:])
    assert client.kept == [PRIVATE] * 2


def test_a_block_in_memory_is_stored_later(
    reference: Reference, store: DirectoryStore, client: Client
) -> None:
    ensurer = ensurer_of(client)
    kept = kept_of(reference, IN_MEMORY)
    assert asyncio.run(ensurer.ensure(kept)) == sizes(kept)
    (block,) = kept_of(reference, STORED)

    async def ensure_and_wait() -> dict[str, int]:
        encoded = await ensurer.ensure([block])
        assert block.key not in store, "expected the answer not to wait for the store"
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
        return encoded

    assert asyncio.run(ensure_and_wait()) == {}
    assert block.key in store
    assert client.kept == [IN_MEMORY]
    assert len(client.asked) == 2


def test_a_read_only_server_stores_nothing(reference: Reference, client: Client) -> None:
    ensurer = ensurer_of(client, read_only=True)
    kept = kept_of(reference, IN_MEMORY)
    assert asyncio.run(ensurer.ensure(kept)) == sizes(kept)
    assert asyncio.run(ensurer.ensure(kept_of(reference, STORED))) == {}
    assert len(client.asked) == 1
    with pytest.raises(MissError):
        asyncio.run(ensurer.ensure(kept_of(reference, STORED), thorough=True))


def test_too_many_blocks_are_refused_before_encoding(reference: Reference, client: Client) -> None:
    blocks = kept_of(reference, PRIVATE, PRIVATE)
    room = sum(one.tokens for one in blocks) * reference.profile.bytes_per_token
    with pytest.raises(ProtocolError, match="raise private_memory"):
        asyncio.run(ensurer_of(client, private_memory=str(room - 1)).ensure(blocks))
    assert client.asked == []
    ensurer = ensurer_of(client, private_memory=str(room))
    assert asyncio.run(ensurer.ensure([*blocks, *blocks])) == sizes(blocks)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    kept = KeptBlocks(10)
    kept.add("a", 4)
    kept.add("b", 4)
    assert kept.use("a")
    kept.add("c", 4)
    assert [kept.use(key) for key in "abc"] == [True, False, True]


def test_a_block_that_is_encoded_twice_counts_once() -> None:
    kept = KeptBlocks(10)
    for _ in range(3):
        kept.add("a", 6)
    kept.add("b", 4)
    assert kept.use("a")
    kept.discard("a")
    kept.discard("a")
    kept.add("c", 6)
    assert [kept.use(key) for key in "abc"] == [False, True, True]


def test_a_prompt_larger_than_the_memory_is_refused() -> None:
    kept = KeptBlocks(10)
    kept.check_room(10)
    with pytest.raises(ProtocolError, match=r"has 11 tokens .* at most 10 .*private_memory"):
        kept.check_room(11)


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
