"""Two tensor-parallel ranks, of which each holds one of the model's two key-value heads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blockattn_rag.server.protocol import BlockPlan
from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine
from tests_vllm.reference import Reference


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        disk = str(reference.folder / "disk")
        engine = Engine(reference.options(disk=disk), tensor_parallel_size=2)
        yield engine
        engine.close()


def test_answers_are_those_of_the_local_engine(reference: Reference, engine: Engine) -> None:
    cases = [reference.telling(place) for place in range(3)]
    said = engine.ask_all([(case.ids, case.params) for case in cases])
    assert [one.tokens for one in said] == [reference.answer(case) for case in cases]
    assert engine.full(cases[0]).tokens == reference.answer(cases[0], "full")


def test_a_missing_block_fails_on_both_and_the_next_is_right(
    reference: Reference, engine: Engine
) -> None:
    assert engine.block(reference.case(41)).reason == "error"
    case = reference.stored(reference.case(6))
    assert engine.block(case).tokens == reference.answer(case)


def test_a_block_that_both_encoded_is_stored_whole(reference: Reference, engine: Engine) -> None:
    block = reference.case(42).blocks[1]
    engine.ask(block, BlockPlan("encode", (len(block),)).to_dict(), max_tokens=1)
    kv, own = reference.written(block), reference.encoded(block)
    assert kv.token_outline == own.token_outline
    for found, expected in zip((*kv.keys, *kv.values), (*own.keys, *own.values), strict=True):
        assert float((found - expected).abs().max()) < 1e-4


def test_entries_in_int8_are_shared_out_beside_others(reference: Reference, engine: Engine) -> None:
    case = reference.case(55, records=3)
    store = DirectoryStore(reference.store)
    fresh = [ids for ids in case.blocks[1:] if reference.key(ids) not in store]
    for ids in fresh[::2]:
        store.put(reference.key(ids), reference.encoded(ids).quantised())
    said = engine.block(reference.stored(case))
    assert said.blocks is not None
    assert said.blocks["int8_blocks"] == len(fresh[::2]) > 0
    assert said.tokens == reference.answer(case)
