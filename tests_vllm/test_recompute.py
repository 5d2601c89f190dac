"""Servers recompute the same tokens as the local engine, and do not share their pages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from blockattn_rag import Recipe
from blockattn_rag.kv.context import place
from blockattn_rag.model.recompute import recompute
from blockattn_rag.server.plan import BlockPlan
from tests_vllm.engines import Engine
from tests_vllm.reference import Case, Reference
from tests_vllm.test_engine import (  # noqa: F401 -- tests that run here with this file's engine
    PAGE,
    slow_engine,
    test_a_missing_block_only_fails_its_request,
    test_an_aborted_load_frees_its_pages,
    test_concurrent_requests_share_pages_where_allowed,
    test_preempted_requests_continue,
    test_two_answers_to_one_prompt_are_both_correct,
)

RECIPE = Recipe(recompute=0.4)
RANKS = {"one rank": 1, "two ranks": 2}


@pytest.fixture(scope="module")
def gate(reference: Reference) -> Path:
    return reference.folder / "gate of recompute"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return RECIPE


@pytest.fixture(scope="module", params=RANKS)
def engine(reference: Reference, gate: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    options = reference.options(recipe=str(RECIPE))
    with slow_engine(options, gate, RANKS[request.param]) as engine:
        yield engine


def answer(reference: Reference, case: Case) -> list[int]:
    """Return the local engine's answer with recomputed tokens."""
    return reference.answer(case, recipe=RECIPE)


def plain(case: Case) -> BlockPlan:
    """Return the plan of a prompt without recomputed tokens."""
    fixed = tuple(range(len(case.lengths)))
    return BlockPlan("complete", case.lengths, keep=case.keep, fixed=fixed)


def recomputed(reference: Reference, case: Case, fixed: tuple[int, ...] = ()) -> list[int]:
    """Return the tokens of each block that the local engine recomputes."""
    model, ends = reference.model, [0, *accumulate(case.lengths)]
    context = place([reference.encoded(block) for block in case.blocks])
    may_change = [index > 0 and index not in fixed for index in range(len(case.lengths))]
    with model.lock:
        _, chosen = recompute(model, context, may_change, case.ids[ends[-1] :], RECIPE.recompute)
    return [sum(ends[i] <= token < ends[i + 1] for token in chosen) for i in range(len(ends) - 1)]


def test_recomputes_the_same_tokens_as_the_local_engine(
    reference: Reference, engine: Engine
) -> None:
    for number in (0, 2, 4):
        case = reference.telling(number)
        said = engine.block(case)
        assert said.tokens == answer(reference, case)
        assert said.tokens != reference.answer(case) or number == 2
        assert said.blocks["recomputed"] == recomputed(reference, case)
        assert said.blocks["loaded_tokens"] == sum(case.lengths)


def test_a_question_longer_than_a_step_is_measured_completely(
    reference: Reference, engine: Engine
) -> None:
    case = reference.case(3, records=2)
    *context, question = case.texts
    texts = (*context, "Read each text twice before you answer. " * 8 + question)
    case = reference.stored(reference.case_of(texts))
    assert len(case.ids) - sum(case.lengths) > 64
    said = engine.block(case)
    assert said.tokens == answer(reference, case)
    assert said.blocks["recomputed"] == recomputed(reference, case)


def test_only_tokens_of_passages_are_recomputed(reference: Reference, engine: Engine) -> None:
    case, fixed = reference.telling(1), (1, 3, 4)
    plan = BlockPlan("complete", case.lengths, keep=case.keep, fixed=fixed)
    said = engine.ask(case.ids, plan.to_dict())
    assert said.blocks["recomputed"] == recomputed(reference, case, fixed)


def test_pages_with_recomputed_tokens_are_not_shared(reference: Reference, engine: Engine) -> None:
    case = reference.telling(0)
    expected, stored = answer(reference, case), reference.answer(case)
    for _ in range(2):
        said = engine.block(case)
        assert said.tokens == expected
        assert said.blocks["local_tokens"] == 0
        assert engine.ask(case.ids, plain(case).to_dict()).tokens == stored
        assert engine.full(case).tokens == reference.answer(case, "full")
    again = engine.ask(case.ids, plain(case).to_dict())
    assert again.blocks["local_tokens"] >= PAGE  # other requests still share pages
    assert not again.blocks["recomputed"]
