"""``vllm serve`` with a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.check.server import check_server
from blockattn_rag.store import DirectoryStore, MemoryStore
from tests.recipes import recipe_of
from tests_vllm.reference import Case, Reference
from tests_vllm.server import Server, serving

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 24}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def recipe(request: pytest.FixtureRequest, reference: Reference) -> Recipe:
    """Recipe that promotes as many passages as there are ranks, and recomputes with one rank."""
    recipe = recipe_of(reference.model, size=0.05, promote=request.param)
    return replace(recipe, recompute=0.3 if request.param == 1 else 0.0)


@pytest.fixture(scope="module")
def server(reference: Reference, recipe: Recipe) -> Iterator[Server]:
    ranks = str(recipe.promote)
    folder = reference.folder / f"served-recipe-{ranks}"
    recipe.save(folder / "recipe")
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind" if ranks == "1" else "0|1"}
    more = ("--tensor-parallel-size", ranks)
    given = {"recipe": str(folder / "recipe")}
    yield from serving(reference, folder.name + "-kv", *more, environment=bind, **given)


def fresh(reference: Reference, recipe: Recipe) -> BlockAttentionEngine:
    """A local engine with an empty store and, like servers, without tails."""
    store = MemoryStore(1 << 28)
    return BlockAttentionEngine(reference.model, store, recipe=recipe, resident_bytes=0)


@pytest.fixture
def local(reference: Reference, recipe: Recipe) -> BlockAttentionEngine:
    return fresh(reference, recipe)


def assert_same(server: Server, local: BlockAttentionEngine, case: Case) -> None:
    answer = server.ask(case.body())
    expected = local.generate(case.prompt, **OPTIONS)
    assert answer.tokens == list(expected.token_ids)
    stats = expected.stats
    assert answer.report == {"mode": "block", **stats.reuse(), "recipe": stats.recipe}


def test_answers_and_counts_equal_those_of_the_local_engine(
    reference: Reference, server: Server, local: BlockAttentionEngine, recipe: Recipe
) -> None:
    assert server.client().info.recipe == recipe.outline
    for case in (reference.case(11), reference.case(12, records=2)):
        for _ in range(2):
            assert_same(server, local, case)


def test_lost_entries_are_encoded_again(
    reference: Reference, server: Server, recipe: Recipe
) -> None:
    case = reference.case(21, records=2)
    store = DirectoryStore(reference.folder / f"served-recipe-{recipe.promote}-kv")
    server.ask(reference.case(1).body())  # keeps the system text in memory
    for question in (case.texts[-1], "Question: What is near the lake?\nAnswer:"):
        for key in list(store.keys()):
            store.delete(key)
        asked = reference.case_of((*case.texts[:-1], question))
        answer = server.ask(asked.body())
        expected = fresh(reference, recipe).generate(asked.prompt, **OPTIONS)
        assert answer.tokens == list(expected.token_ids)
        assert answer.report["misses"] == expected.stats.misses - 1
        assert answer.report["hits"] == 1


def test_check_server_passes(server: Server) -> None:
    report = check_server(server.client())
    assert [row.name for row in report.rows if not row.passed] == []
