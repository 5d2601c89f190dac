"""A server whose context blocks but the first are encoded after a sink, which is not stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.server.profile import ModelProfile, profile_of
from blockattn_rag.server.protocol import BlockPlan
from tests_vllm.engines import Engine
from tests_vllm.reference import Reference, assert_close

SINK = "head:4"


@pytest.fixture(scope="module")
def profile(reference: Reference) -> ModelProfile:
    return profile_of(reference.model, Recipe(SINK))


@pytest.fixture(scope="module")
def engine(reference: Reference, profile: ModelProfile) -> Iterator[Engine]:
    path = reference.folder / "sink.json"
    profile.write(path)
    engine = Engine(reference.options(profile=str(path)))
    yield engine
    engine.close()


def test_encodes_after_sink(reference: Reference, engine: Engine, profile: ModelProfile) -> None:
    case = reference.case(12)
    sink = list(profile.sink_ids)
    prompts = [case.blocks[0], *([*sink, *block] for block in case.blocks[1:])]
    plans = [
        BlockPlan("encode", (length,), keep=("store",), opens_prompt=not place).to_dict()
        for place, length in enumerate(case.lengths)
    ]
    engine.ask_all([*zip(prompts, plans, strict=True)], max_tokens=1)
    for block in case.blocks[1:]:
        assert_close(reference.written(block, sink), reference.encoded(block, sink))
    assert engine.block(case).tokens == reference.answer(case, recipe=SINK)


def test_refuses_other_prefix(reference: Reference, engine: Engine, profile: ModelProfile) -> None:
    block = reference.case(13).blocks[1]
    plan = BlockPlan("encode", (len(block),), keep=("store",)).to_dict()
    assert engine.ask([5, 6, 7, 8, *block], plan, max_tokens=1).reason == "error"
    assert engine.ask([*profile.sink_ids, *block], plan, max_tokens=1).reason == "length"
