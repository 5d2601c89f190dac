"""Servers with a recipe encode like the local engine, with any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.prompts.blocks import IN_MEMORY, STORED, Keep
from blockattn_rag.server.keys import block_keys
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.profile import ModelProfile, profile_of
from blockattn_rag.store import DirectoryStore, MemoryStore
from tests.recipes import recipe_of
from tests_vllm.engines import Engine, running
from tests_vllm.reference import TELLING, TOKENS, WRITTEN_S, Case, Reference

PIPELINE = {"pipeline_parallel_size": 2, "worker_extension_cls": "tests_vllm.test_ranks.Rehearsed"}
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "int8": ({"kv_dtype": "int8"}, {}),
    "two ranks": ({}, {"tensor_parallel_size": 2}),
    "two stages": ({"read_only": True}, PIPELINE),
}
"""Options of the connector and of the engine."""


@pytest.fixture(scope="module")
def recipe(reference: Reference) -> Recipe:
    return recipe_of(reference.model, size=0.1)


@pytest.fixture(scope="module")
def profile(reference: Reference, recipe: Recipe) -> ModelProfile:
    return profile_of(reference.model, recipe)


@pytest.fixture(scope="module")
def folder_of_recipe(reference: Reference, recipe: Recipe) -> str:
    folder = reference.folder / "recipes"
    recipe.save(folder / "recipe")
    return str(folder / "recipe")


@pytest.fixture(scope="module", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def store(reference: Reference, kind: str) -> DirectoryStore:
    return DirectoryStore(reference.folder / f"recipe of {kind}")


@pytest.fixture(scope="module")
def engine(
    reference: Reference, folder_of_recipe: str, kind: str, store: DirectoryStore
) -> Iterator[Engine]:
    options, more = ENGINES[kind]
    options = reference.options(store=str(store.path), recipe=folder_of_recipe, **options)
    with running(options, **more) as engine:
        if kind == "two stages":
            engine.llm.collective_rpc("rehearse")
        yield engine


def local(reference: Reference, recipe: Recipe, store: Any, kind: str, **more: Any) -> Any:
    kv_dtype = "int8" if kind == "int8" else "model"
    return BlockAttentionEngine(reference.model, store, recipe=recipe, kv_dtype=kv_dtype, **more)


def answer(engine: Any, case: Case) -> list[int]:
    """Return greedy tokens, like ``Reference.answer``."""
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "temperature": 0.0}
    return list(engine.generate(case.prompt, **options).token_ids)


def encode(engine: Engine, profile: ModelProfile, case: Case, keep: Keep) -> None:
    """Let the server encode the blocks of a prompt."""
    asked = []
    for place, block in enumerate(case.blocks):
        ids = [*(profile.sink_ids if place else ()), *block]
        plan = BlockPlan("encode", (len(block),), keep=(keep,), opens_prompt=not place)
        asked.append((ids, plan.to_dict()))
    assert {one.reason for one in engine.ask_all(asked, max_tokens=1)} == {"length"}


def wait_for(store: DirectoryStore, profile: ModelProfile, case: Case) -> None:
    plan = BlockPlan("complete", case.lengths, keep=case.keep)
    keys = [block.key for block in block_keys(case.ids, plan, profile)]
    until = time.monotonic() + WRITTEN_S
    while not all(key in store for key in keys):
        assert time.monotonic() < until, f"not stored within {WRITTEN_S} s"
        time.sleep(0.05)


@pytest.mark.parametrize("number", TELLING[:3])
def test_blocks_encoded_by_a_server_give_the_same_answers_on_both_sides(
    reference: Reference, engine: Engine, recipe: Recipe, profile: ModelProfile, kind: str,
    store: DirectoryStore, number: int,
) -> None:  # fmt: skip
    case = reference.case(number, records=2)
    expected = answer(local(reference, recipe, MemoryStore(1 << 28), kind), case)
    assert expected != reference.answer(case, recipe=Recipe(recipe.sink))
    keep: Keep = IN_MEMORY if kind == "two stages" else STORED
    encode(engine, profile, case, keep)
    if keep == STORED:
        wait_for(store, profile, case)
    assert engine.block(case, keep).tokens == expected
    if keep == STORED:
        found = local(reference, recipe, DirectoryStore(store.path), kind, on_miss="error")
        assert answer(found, case) == expected


def test_a_server_finds_blocks_stored_by_the_local_engine(
    reference: Reference, engine: Engine, recipe: Recipe, kind: str, store: DirectoryStore
) -> None:
    case = reference.case(30, records=2)
    expected = answer(local(reference, recipe, DirectoryStore(store.path), kind), case)
    assert engine.block(case).tokens == expected


def test_encoding_after_another_prefix_than_the_sink_is_refused(
    reference: Reference, engine: Engine, profile: ModelProfile
) -> None:
    block = reference.case(13).blocks[1]
    plan = BlockPlan("encode", (len(block),), keep=(IN_MEMORY,)).to_dict()
    assert engine.ask([5, 6, 7, 8, *block], plan, max_tokens=1).reason == "error"
    assert engine.ask([*profile.sink_ids, *block], plan, max_tokens=1).reason == "length"
