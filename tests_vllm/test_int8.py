"""A server that stores blocks in int8, and reads int8 and float entries."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.prompts.blocks import IN_MEMORY
from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine, running
from tests_vllm.reference import TELLING, TOKENS, Case, Reference


@pytest.fixture(scope="module")
def store(reference: Reference) -> DirectoryStore:
    return DirectoryStore(reference.folder / "int8")


@pytest.fixture(scope="module")
def options(reference: Reference, store: DirectoryStore) -> dict[str, Any]:
    return reference.options(store=str(store.path), kv_dtype="int8")


@pytest.fixture(scope="module")
def engine(options: dict[str, Any]) -> Iterator[Engine]:
    with running(options) as engine:
        yield engine


@pytest.fixture(scope="module")
def local(reference: Reference, store: DirectoryStore) -> BlockAttentionEngine:
    """This package's engine with the store of the server."""
    return BlockAttentionEngine(reference.model, DirectoryStore(store.path), kv_dtype="int8")


def encode(engine: Engine, reference: Reference, store: DirectoryStore, case: Case) -> None:
    """Let the server encode the blocks of a prompt that are not stored."""
    missing = [ids for ids in case.blocks if reference.key(ids) not in store]
    engine.encode(missing)
    until = time.monotonic() + 30
    while not all(reference.key(ids) in store for ids in missing) and time.monotonic() < until:
        time.sleep(0.05)


def answer(local: BlockAttentionEngine, case: Case) -> list[int]:
    """Return greedy tokens of the local engine, which only computes private blocks."""
    made = local.generate(
        case.prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, temperature=0.0
    )
    assert made.stats.misses <= 1  # the system message has a private key
    assert made.stats.int8_blocks
    return list(made.token_ids)


def test_encoded_int8_blocks_equal_the_local_ones(
    reference: Reference, engine: Engine, store: DirectoryStore
) -> None:
    case = reference.case(TELLING[0])
    encode(engine, reference, store, case)
    for ids in case.blocks:
        kv, own = store.get(reference.key(ids)), reference.encoded(ids).quantized()
        assert kv is not None
        assert kv.scales is not None
        assert kv.nbytes == own.nbytes == reference.profile.block_bytes(len(ids), "int8")
        for found, expected in zip((*kv.keys, *kv.values), (*own.keys, *own.values), strict=True):
            assert int((found.int() - expected.int()).abs().max()) <= 1


@pytest.mark.parametrize("number", TELLING[:3])
def test_a_prompt_may_mix_int8_and_float_blocks(
    reference: Reference,
    engine: Engine,
    store: DirectoryStore,
    local: BlockAttentionEngine,
    number: int,
) -> None:
    case = reference.case(number, records=3)
    missing = [ids for ids in case.blocks[1:] if reference.key(ids) not in store]
    for ids in missing[::2]:
        store.put(reference.key(ids), reference.encoded(ids))
    encode(engine, reference, store, case)
    kinds = [kv.scales is not None for ids in case.blocks if (kv := store.get(reference.key(ids)))]
    assert 1 < sum(kinds) < len(kinds) == len(case.lengths)
    said = engine.block(case)
    assert said.blocks["int8_blocks"] == sum(kinds)
    assert said.tokens == answer(local, case)


def test_blocks_in_memory_are_kept_in_int8(
    reference: Reference, engine: Engine, local: BlockAttentionEngine
) -> None:
    case = reference.case(47)
    engine.encode(case.blocks, IN_MEMORY)
    said = engine.block(case, IN_MEMORY)
    assert said.blocks["int8_blocks"] == len(case.lengths)
    made = local.generate(case.prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
    assert said.tokens == list(made.token_ids)
