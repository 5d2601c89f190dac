"""Preempted requests whose pages were evicted from a full cache are loaded again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests_vllm.engines import Engine, running
from tests_vllm.reference import Reference


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[Engine]:
    more = {"num_gpu_blocks_override": 20, "max_model_len": 1024}
    with running(reference.options(), enable_prefix_caching=False, **more) as engine:
        yield engine


def test_evicted_pages_are_loaded_again(reference: Reference, engine: Engine) -> None:
    cases = [reference.telling(place) for place in range(4)]
    expected = [reference.answer(case, tokens=200) for case in cases]
    said = engine.ask_all([(case.ids, case.params) for case in cases], max_tokens=200)
    lost = engine.counted("vllm:num_preemptions")
    assert lost > 0
    assert engine.counted("vllm:blockattn_loads") == len(cases) + lost
    assert [one.tokens for one in said] == expected
