"""Private blocks are only kept in the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED, Keep
from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine, running
from tests_vllm.reference import Reference

ROOM = 512
PAGE = 128


@pytest.fixture(scope="module")
def home(reference: Reference) -> DirectoryStore:
    """The store of the server. It is separate, because the local engine stores its blocks."""
    return DirectoryStore(reference.folder / "private")


@pytest.fixture(scope="module")
def engine(reference: Reference, home: DirectoryStore) -> Iterator[Engine]:
    """Two ranks of a read-only server, which encodes blocks for its memory."""
    options = reference.options(
        store=str(home.path),
        read_only=True,
        private_memory=f"{ROOM * reference.profile.bytes_per_token}",
        disk=str(reference.folder / "private-disk"),
    )
    with running(options, tensor_parallel_size=2) as engine:
        yield engine


@pytest.mark.parametrize("keep", [PRIVATE, IN_MEMORY])
def test_answers_equal_those_of_the_local_engine_and_nothing_is_stored(
    reference: Reference, home: DirectoryStore, engine: Engine, keep: Keep
) -> None:
    case = reference.case({PRIVATE: 33, IN_MEMORY: 34}[keep])
    engine.encode(case.blocks, keep)
    said = engine.block(case, keep)
    assert said.tokens == reference.answer(case)
    assert said.blocks["loaded_tokens"] == sum(case.lengths)
    assert engine.block(case, keep).tokens == said.tokens
    assert not list(reference.folder.glob("private*/**/*.safetensors"))


def test_private_blocks_have_their_own_pages(
    reference: Reference, home: DirectoryStore, engine: Engine
) -> None:
    case = reference.case(35)
    long = reference.case_of((*case.texts, "And" + " a" * 300))
    engine.encode(long.blocks, PRIVATE)
    first, second = (engine.block(long, PRIVATE) for _ in range(2))
    assert first.tokens == second.tokens == reference.answer(long)
    assert first.blocks["local_tokens"] == 0
    assert second.blocks["local_tokens"] >= PAGE
    assert engine.block(long).reason == "error", "expected only private blocks in memory"
    for block in long.blocks:
        home.put(reference.key(block), reference.encoded(block))
    said = engine.block(long)
    assert said.tokens == reference.answer(long)
    assert said.blocks["local_tokens"] == 0


def test_the_least_recently_used_blocks_are_evicted(reference: Reference, engine: Engine) -> None:
    first, *others = (reference.case(number) for number in (36, 37, 38))
    assert sum(first.lengths) + sum(others[0].lengths) <= ROOM
    assert sum(sum(case.lengths) for case in (first, *others)) > ROOM
    engine.encode([*first.blocks, *others[0].blocks], PRIVATE)
    assert engine.block(others[0], PRIVATE).tokens == reference.answer(others[0])
    engine.encode(others[1].blocks, PRIVATE)
    assert engine.block(first, PRIVATE).reason == "error"
    assert engine.block(others[1], PRIVATE).tokens == reference.answer(others[1])


def test_blocks_that_the_server_cannot_keep_are_refused(
    reference: Reference, engine: Engine
) -> None:
    refused = engine.counted("vllm:blockattn_refused")
    assert engine.encode([reference.case(39).blocks[1]], STORED) == ["error"]
    assert engine.encode([[5] * (ROOM + 1)], PRIVATE) == ["error"]
    assert engine.counted("vllm:blockattn_refused") == refused + 2
    assert engine.encode([[5] * ROOM], PRIVATE) == ["length"]
