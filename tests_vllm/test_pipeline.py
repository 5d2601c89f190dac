"""Two pipeline-parallel ranks, of which each holds some of the model's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blockattn_rag.prompts.blocks import Keep
from blockattn_rag.server.protocol import BlockPlan
from tests_vllm.engines import Engine
from tests_vllm.reference import Reference


class Rehearsed:
    """What vLLM's worker can do besides: run the model once on nothing.

    Its runner for CPUs leaves that out where nothing is compiled, and the second rank has then no
    place for what the first one gives it (vLLM 0.32).
    """

    model_runner: Any

    def rehearse(self) -> None:
        self.model_runner.profile_run()


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
        engine = Engine(
            reference.options(disk=str(reference.folder / "disk-of-pipeline"), read_only=True),
            pipeline_parallel_size=2,
            worker_extension_cls=f"{__name__}.Rehearsed",
        )
        engine.llm.collective_rpc("rehearse")
        yield engine
        engine.close()


def test_answers_are_those_of_the_local_engine(reference: Reference, engine: Engine) -> None:
    cases = [reference.telling(place) for place in range(3)]
    said = engine.ask_all([(case.ids, case.params) for case in cases])
    assert [one.tokens for one in said] == [reference.answer(case) for case in cases]
    assert engine.full(cases[0]).tokens == reference.answer(cases[0], "full")


def test_each_rank_keeps_its_own_layers_on_disk(reference: Reference, engine: Engine) -> None:
    engine.block(reference.telling(3))
    kept = {path.name for path in (reference.folder / "disk-of-pipeline").rglob("layers-*")}
    assert kept == {"layers-0-2-heads-0-2", "layers-2-4-heads-0-2"}


def test_a_missing_block_fails_on_both_and_the_next_is_right(
    reference: Reference, engine: Engine
) -> None:
    assert engine.block(reference.case(41)).reason == "error"
    case = reference.stored(reference.case(6))
    assert engine.block(case).tokens == reference.answer(case)


def test_a_block_that_may_not_be_stored_is_kept_by_each_rank(
    reference: Reference, engine: Engine
) -> None:
    case = reference.case(47)
    keep: Keep = "memory"
    for block in case.blocks:
        plan = BlockPlan("encode", (len(block),), keep=(keep,))
        assert engine.ask(block, plan.to_dict(), max_tokens=1).reason == "length"
    plan = BlockPlan("complete", case.lengths, keep=(keep,) * len(case.lengths))
    assert engine.ask(case.ids, plan.to_dict()).tokens == reference.answer(case)
