"""Recipes as an argument of the LLM, of its calls, and in what is reported."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag import Recipe
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform
from blockattn_rag.llama_index.messages import BlockReuseEvent
from blockattn_rag.llama_index.nodes import canonical_text
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.markers import wrap
from tests.llama_index.conftest import RecordingEngine, passages
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

MARKED = f"Head. {''.join(wrap(canonical_text(node)) for node in passages(3))}Q"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def test_the_constructor_has_few_arguments() -> None:
    _, *own, rest = inspect.signature(BlockAttentionLLM.__init__).parameters
    assert (len(own), rest) == (14, "llm_fields")


def test_the_model_and_its_ingestion_run_with_the_recipe(tmp_path: Path, saved_model: Path) -> None:
    recipe = recipe_of(BlockModel.from_pretrained(saved_model))
    recipe.save(tmp_path / "mine")
    llm = BlockAttentionLLM(
        str(saved_model), kv_store=tmp_path / "kv", recipe=tmp_path / "mine", max_new_tokens=4
    )
    BlockKVTransform(llm=llm)(passages(3))
    usage = llm.complete(MARKED, formatted=True).raw["usage"]
    assert (usage["hits"], usage["misses"]) == (3, 1)
    assert usage["recipe"] == str(recipe)
    plain = llm.complete(MARKED, formatted=True, recipe="none").raw["usage"]
    assert (plain["hits"], plain["misses"]) == (1, 3)
    copy = BlockAttentionLLM.from_dict(llm.to_dict())
    assert copy.engine.recipe == recipe
    alone = BlockKVTransform(str(saved_model), kv_store=tmp_path / "kv", recipe=tmp_path / "mine")
    alone(passages(3))
    assert alone.stats is not None
    assert alone.stats.reused == 3


def test_a_recipe_beside_the_store_is_found(tmp_path: Path, saved_model: Path) -> None:
    recipe = recipe_of(BlockModel.from_pretrained(saved_model))
    recipe.save(tmp_path / "recipe")
    llm = BlockAttentionLLM(str(saved_model), kv_store=tmp_path / "kv", max_new_tokens=4)
    assert llm.complete(MARKED, formatted=True).raw["usage"]["recipe"] == str(recipe)


def test_what_is_not_said_is_the_engines_own(block_model: Any) -> None:
    engine = RecordingEngine(block_model, recipe=Recipe(promote=1))
    usage = BlockAttentionLLM(engine=engine, max_new_tokens=4).complete(MARKED).raw["usage"]
    assert usage["promoted_tokens"] > 0


def test_promoted_tokens_are_shown(llm: BlockAttentionLLM) -> None:
    promoting = Recipe(promote=3)
    promoted = llm.complete(MARKED, recipe=promoting).raw["usage"]
    plain = llm.complete(MARKED).raw["usage"]
    assert promoted["promoted_tokens"] > 40
    assert plain["promoted_tokens"] == 0
    prompt = llm.to_prompt(MARKED, formatted=False)
    stats = llm.engine.generate(prompt, recipe=promoting, max_new_tokens=1).stats
    event = BlockReuseEvent(stats=stats).model_dump()
    assert event["promoted_tokens"] == promoted["promoted_tokens"]


def test_what_is_no_recipe_is_refused_at_once(engine: RecordingEngine) -> None:
    kinds: list[Any] = [BlockAttentionLLM, BlockKVTransform]
    for kind in kinds:
        with pytest.raises(ValueError, match="Found no recipe at nowhere"):
            kind("bundled", recipe="nowhere")
        with pytest.raises(ValueError, match="beside engine=, which has its own"):
            kind(engine=engine, recipe="bos")
    llm = BlockAttentionLLM(engine=engine)
    with pytest.raises(ValueError, match="either llm=, or the model, store and recipe"):
        BlockKVTransform(llm=llm, recipe="bos")


def test_a_cached_ingestion_ends_with_its_recipe(block_model: Any) -> None:
    def cached(recipe: Any) -> dict[str, Any]:
        return BlockKVTransform(engine=RecordingEngine(block_model, recipe=recipe)).to_dict()

    recipe = recipe_of(block_model)
    told = [cached(one)["encoding"] for one in ("none", "bos", recipe, recipe)]
    assert told[2] == told[3]
    assert told[0] != told[1] != told[2]
    promoting = recipe_of(block_model, promote=1)
    assert cached(promoting)["encoding"] == told[2]  # its passages are the same blocks
