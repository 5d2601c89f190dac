"""Private blocks are only kept in the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from blockattn_rag.prompts.blocks import IN_MEMORY, PRIVATE, STORED, Keep
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine, Said
from tests_vllm.reference import Case, Reference

ROOM = 512
PAGE = 128


@pytest.fixture(scope="module")
def home(reference: Reference) -> DirectoryStore:
    """The store of the server. It is separate, because the local engine stores its blocks."""
    return DirectoryStore(reference.folder / "private")


@pytest.fixture(scope="module")
def engine(reference: Reference, home: DirectoryStore) -> Iterator[Engine]:
    """Two ranks of a read-only server, which encodes blocks for its memory."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        options = reference.options(
            store=str(home.path),
            read_only=True,
            private_memory=f"{ROOM * reference.profile.bytes_per_token}",
            disk=str(reference.folder / "private-disk"),
        )
        engine = Engine(options, tensor_parallel_size=2)
        yield engine
        engine.close()


def encode(engine: Engine, blocks: Sequence[list[int]], keep: Keep = PRIVATE) -> list[Said]:
    plans = [BlockPlan("encode", (len(block),), keep=(keep,)).to_dict() for block in blocks]
    return engine.ask_all([*zip(blocks, plans, strict=True)], max_tokens=1)


def ask(engine: Engine, case: Case, keep: Keep = PRIVATE) -> Said:
    plan = BlockPlan("complete", case.lengths, keep=(keep,) * len(case.lengths))
    return engine.ask(case.ids, plan.to_dict())


@pytest.mark.parametrize("keep", [PRIVATE, IN_MEMORY])
def test_answers_equal_those_of_the_local_engine_and_nothing_is_stored(
    reference: Reference, home: DirectoryStore, engine: Engine, keep: Keep
) -> None:
    case = reference.case({PRIVATE: 33, IN_MEMORY: 34}[keep])
    encode(engine, case.blocks, keep)
    said = ask(engine, case, keep)
    assert said.tokens == reference.answer(case)
    assert said.blocks is not None
    assert said.blocks["loaded_tokens"] == sum(case.lengths)
    assert ask(engine, case, keep).tokens == said.tokens
    assert not list(reference.folder.glob("private*/**/*.safetensors"))


def test_private_blocks_have_their_own_pages(
    reference: Reference, home: DirectoryStore, engine: Engine
) -> None:
    case = reference.case(35)
    long = reference.case_of((*case.texts, "And" + " a" * 300))
    encode(engine, long.blocks)
    local = []
    for _ in range(2):
        said = ask(engine, long)
        assert said.tokens == reference.answer(long)
        assert said.blocks is not None
        local.append(said.blocks["local_tokens"])
    assert local[0] == 0
    assert local[1] >= PAGE
    assert engine.block(long).reason == "error", "expected only private blocks in memory"
    for block in long.blocks:
        home.put(reference.key(block), reference.encoded(block))
    said = engine.block(long)
    assert said.tokens == reference.answer(long)
    assert said.blocks is not None
    assert said.blocks["local_tokens"] == 0


def test_the_least_recently_used_blocks_are_evicted(reference: Reference, engine: Engine) -> None:
    first, *others = (reference.case(number) for number in (36, 37, 38))
    assert sum(first.lengths) + sum(others[0].lengths) <= ROOM
    assert sum(sum(case.lengths) for case in (first, *others)) > ROOM
    encode(engine, first.blocks)
    encode(engine, others[0].blocks)
    assert ask(engine, others[0]).tokens == reference.answer(others[0])
    encode(engine, others[1].blocks)
    assert ask(engine, first).reason == "error"
    assert ask(engine, others[1]).tokens == reference.answer(others[1])


def test_blocks_that_the_server_cannot_keep_are_refused(
    reference: Reference, engine: Engine
) -> None:
    refused = engine.counted("vllm:blockattn_refused")
    (said,) = encode(engine, [reference.case(39).blocks[1]], STORED)
    assert said.reason == "error"
    (said,) = encode(engine, [[5] * (ROOM + 1)])
    assert said.reason == "error"
    assert engine.counted("vllm:blockattn_refused") == refused + 2
    (said,) = encode(engine, [[5] * ROOM])
    assert said.reason == "length"
