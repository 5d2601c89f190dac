"""Loads that a step waits for (``load_async: false``)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockattn_rag.store import DirectoryStore
from tests_vllm.engines import Engine
from tests_vllm.reference import Reference
from tests_vllm.slow import GATE, reached


@pytest.fixture(scope="module")
def gate(reference: Reference) -> Path:
    return reference.folder / "sync-gate"


@pytest.fixture(scope="module")
def engine(reference: Reference, gate: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(GATE, str(gate))
        engine = Engine(
            reference.options(load_async=False),
            module="tests_vllm.slow",
            name="SlowConnector",
            max_num_batched_tokens=64,
        )
        yield engine
        engine.close()


def test_answers_are_those_of_the_local_engine(reference: Reference, engine: Engine) -> None:
    cases = [reference.telling(place) for place in range(4)]
    said = engine.ask_all([(case.ids, case.params) for case in cases])
    assert [one.tokens for one in said] == [reference.answer(case) for case in cases]


def test_a_missing_block_fails_its_request_alone(reference: Reference, engine: Engine) -> None:
    missing = reference.case(40)
    case = reference.stored(reference.case(5))
    lost, answered = engine.ask_all([(one.ids, one.params) for one in (missing, case)])
    assert (lost.reason, lost.tokens) == ("error", [])
    assert answered.tokens == reference.answer(case)
    reference.stored(missing)
    assert engine.block(missing).tokens == reference.answer(missing)


def test_pages_of_an_answer_that_ends_with_its_first_token_are_kept(
    reference: Reference, engine: Engine
) -> None:
    case = reference.telling(6)
    for least in (0, 128):
        said = engine.block(case, max_tokens=1)
        assert said.blocks is not None
        assert said.blocks["local_tokens"] >= least


def test_pages_that_were_not_filled_are_nobody_s_though_their_request_was_left(
    reference: Reference, engine: Engine, gate: Path
) -> None:
    case = reference.telling(5)
    lost = case.blocks[1]
    DirectoryStore(reference.store).delete(reference.key(lost))
    gate.touch()
    engine.add("left", case.ids, case.params)
    while not reached(gate).exists():
        time.sleep(0.01)
    engine.leave("left")
    time.sleep(1)  # by now the engine knows, which waits for the load
    gate.unlink()
    assert engine.block(case).reason == "error"
    reference.stored(case)
    assert engine.block(case).tokens == reference.answer(case)
