"""Loads that a step waits for (``load_async: false``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests_vllm.engines import Engine
from tests_vllm.reference import Reference


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[Engine]:
    engine = Engine(reference.options(load_async=False), max_num_batched_tokens=64)
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
