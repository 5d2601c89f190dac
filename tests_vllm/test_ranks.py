"""Two ranks that split heads (tensor parallelism) or layers (pipeline parallelism)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.prompts.blocks import IN_MEMORY
from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine, running
from tests_vllm.reference import Reference, assert_close
from tests_vllm.tiny import FAMILIES, save


class Rehearsed:
    """Worker extension with a dummy run of the model.

    vLLM 0.32 skips this on CPUs if nothing is compiled, and the second rank then has no buffer for
    the output of the first one.
    """

    model_runner: Any

    def rehearse(self) -> None:
        self.model_runner.profile_run()


@pytest.fixture(scope="module")
def tensor(reference: Reference) -> Iterator[Engine]:
    """Engine in which each rank has one of the two key-value heads."""
    options = reference.options(disk=str(reference.folder / "disk-of-tensor"))
    with running(options, tensor_parallel_size=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def pipeline(reference: Reference) -> Iterator[Engine]:
    """Engine in which each rank has some of the layers."""
    more: dict[str, Any] = {
        "pipeline_parallel_size": 2,
        "worker_extension_cls": f"{__name__}.Rehearsed",
    }
    options = reference.options(disk=str(reference.folder / "disk-of-pipeline"), read_only=True)
    with running(options, **more) as engine:
        engine.llm.collective_rpc("rehearse")
        yield engine


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    engine: Engine = request.getfixturevalue(request.param)
    return engine


BOTH = pytest.mark.parametrize("engine", ["tensor", "pipeline"], indirect=True)


@BOTH
def test_answers_equal_those_of_the_local_engine(reference: Reference, engine: Engine) -> None:
    cases = [reference.telling(place) for place in range(3)]
    said = engine.ask_all([(case.ids, case.params) for case in cases])
    assert [one.tokens for one in said] == [reference.answer(case) for case in cases]
    assert engine.full(cases[0]).tokens == reference.answer(cases[0], "full")


@BOTH
def test_a_missing_block_fails_on_both_ranks(reference: Reference, engine: Engine) -> None:
    assert engine.block(reference.case(41)).reason == "error"
    case = reference.stored(reference.case(6))
    assert engine.block(case).tokens == reference.answer(case)


def test_a_block_encoded_by_both_ranks_is_stored_completely(
    reference: Reference, tensor: Engine
) -> None:
    block = reference.case(42).blocks[1]
    tensor.encode([block])
    kv, own = reference.written(block), reference.encoded(block)
    assert kv.token_outline == own.token_outline
    assert_close(kv, own)


def test_int8_and_float_entries_are_split_between_ranks(
    reference: Reference, tensor: Engine
) -> None:
    case = reference.case(55, records=3)
    store = DirectoryStore(reference.store)
    fresh = [ids for ids in case.blocks[1:] if reference.key(ids) not in store]
    for ids in fresh[::2]:
        store.put(reference.key(ids), reference.encoded(ids).quantized())
    said = tensor.block(reference.stored(case))
    assert said.blocks["int8_blocks"] == len(fresh[::2]) > 0
    assert said.tokens == reference.answer(case)


def test_each_rank_keeps_its_own_layers_on_disk(reference: Reference, pipeline: Engine) -> None:
    pipeline.block(reference.telling(3))
    kept = {path.name for path in (reference.folder / "disk-of-pipeline").rglob("layers-*")}
    assert kept == {"layers-0-2-heads-0-2", "layers-2-4-heads-0-2"}


def test_each_rank_keeps_private_blocks(reference: Reference, pipeline: Engine) -> None:
    case = reference.case(47)
    assert {*pipeline.encode(case.blocks, IN_MEMORY)} == {"length"}
    assert pipeline.block(case, IN_MEMORY).tokens == reference.answer(case)


def test_each_rank_has_all_latents(tmp_path: Path) -> None:
    reference = Reference(tmp_path, str(save("latent", tmp_path / "model")))
    more = {"tensor_parallel_size": 2, "model": reference.name, **(FAMILIES["latent"].engine or {})}
    case, other = reference.stored(reference.case(25, records=2)), reference.case(40)
    with running(reference.options(), **more) as engine:
        assert engine.block(case).tokens == reference.answer(case)
        assert engine.full(case).tokens == reference.answer(case, "full")
        block = other.blocks[2]
        engine.encode([block])
        assert_close(reference.written(block), reference.encoded(block))
