"""``vllm serve`` with a recipe, asked by this package's client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.check.server import check_server
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.profile import profile_of
from blockattn_rag.store import DirectoryStore, MemoryStore
from tests.recipes import recipe_of
from tests_vllm.reference import Reference
from tests_vllm.server import KEY, Server, serving

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 24}


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def recipe(request: pytest.FixtureRequest, reference: Reference) -> Recipe:
    """As many passages are promoted as the server has ranks."""
    return recipe_of(reference.model, size=0.05, promote=request.param)


@pytest.fixture(scope="module")
def server(reference: Reference, recipe: Recipe) -> Iterator[Server]:
    ranks = str(recipe.promote)
    folder = reference.folder / f"served-recipe-{ranks}"
    recipe.save(folder / "recipe")
    profile_of(reference.model, recipe).write(folder / "profile.json")
    files = {"recipe": str(folder / "recipe"), "profile": str(folder / "profile.json")}
    bind = {"VLLM_CPU_OMP_THREADS_BIND": "nobind" if ranks == "1" else "0|1"}
    more = ("--tensor-parallel-size", ranks)
    yield from serving(reference, folder.name + "-kv", *more, environment=bind, **files)


def fresh(reference: Reference, recipe: Recipe) -> BlockAttentionEngine:
    """An engine with an empty store, and without tails, which servers do not keep."""
    store = MemoryStore(1 << 28)
    return BlockAttentionEngine(reference.model, store, recipe=recipe, resident_bytes=0)


@pytest.fixture
def local(reference: Reference, recipe: Recipe) -> BlockAttentionEngine:
    return fresh(reference, recipe)


def test_answers_and_counts_are_those_of_the_local_engine(
    reference: Reference, engine: RemoteEngine, local: BlockAttentionEngine, recipe: Recipe
) -> None:
    assert engine.recipe == recipe.outline
    for case in (reference.case(11), reference.case(12, records=2)):
        for given in ({}, {"recipe": recipe}):
            found = engine.generate(list(case.texts), **OPTIONS, **given)
            expected = local.generate(list(case.texts), **OPTIONS)
            assert found.token_ids == expected.token_ids
            assert found.stats.reuse() == expected.stats.reuse()
            assert found.stats.recipe == expected.stats.recipe == str(recipe)


def test_private_blocks_have_the_adapter_too(
    reference: Reference, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    passages = [Block(text) for text in reference.case(17).texts[1:4]]
    turn = Block.of([Span("A turn of Ms Halden's own.", "conversation")])
    head = Block.of([Span("Be brief.\n", "system")])
    prompt = BlockPrompt((head, *passages, turn), "Question: Who?\nAnswer:")
    for _ in range(2):
        found, expected = (one.generate(prompt, **OPTIONS) for one in (engine, local))
        assert found.token_ids == expected.token_ids
        assert found.stats.reuse() == expected.stats.reuse()


def test_encodes_lost_entries(reference: Reference, engine: RemoteEngine, recipe: Recipe) -> None:
    texts = list(reference.case(21, records=2).texts)
    store = DirectoryStore(reference.folder / f"served-recipe-{recipe.promote}-kv")
    for question in (texts[-1], "Question: What is near the lake?\nAnswer:"):
        for key in list(store.keys()):
            store.delete(key)
        found = engine.generate([*texts[:-1], question], **OPTIONS)
        expected = fresh(reference, recipe).generate([*texts[:-1], question], **OPTIONS)
        assert found.token_ids == expected.token_ids
        assert found.stats.reuse() == expected.stats.reuse()


def test_the_check_of_a_server_proves_its_recipe(
    reference: Reference, server: Server, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    url = str(server.http.base_url)
    report = check_server(url, reference.model, recipe, api_key=KEY)
    assert [row.name for row in report.rows if not row.passed] == []
    report = check_server(url, reference.model, Recipe(recipe.sink), api_key=KEY)
    assert [row.name for row in report.rows if not row.passed] == ["recipe = local recipe"]
