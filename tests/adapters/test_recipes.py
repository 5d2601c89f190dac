"""Recipes of models and ingestion steps, and as options of single calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.markers import wrap
from tests.adapters.frameworks import EACH, WHOLE_OR_STREAM, Framework, How
from tests.engines import tuned_engine
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

pytestmark = EACH

TEXTS = [f"Passage {n}: {' '.join(f'w{n}x{i}' for i in range(10))}." for n in range(3)]
QUESTION = f"{''.join(map(wrap, TEXTS))}Which?"


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a stock model, that is, one without block fine-tuning."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def recipe(saved_model: Path) -> Recipe:
    return recipe_of(BlockModel.from_pretrained(saved_model))


def test_the_model_and_its_ingestion_run_with_the_recipe(
    framework: Framework, tmp_path: Path, saved_model: Path, recipe: Recipe
) -> None:
    recipe.save(tmp_path / "mine")
    where = {"kv_store": tmp_path / "kv", "recipe": tmp_path / "mine"}
    chat = framework.chat(str(saved_model), 4, **where)
    framework.ingest(framework.ingestion(llm=chat), TEXTS)
    reuse = framework.ask(chat, "whole", QUESTION).reuse
    assert (reuse["hits"], reuse["misses"]) == (3, 1)  # the miss is the text before the passages
    assert reuse["recipe"] == str(recipe)
    assert chat.engine.recipe == recipe
    plain = framework.ask(chat, "whole", QUESTION, recipe="none").reuse
    assert (plain["hits"], plain["misses"]) == (1, 3)
    alone = framework.ingestion(model=str(saved_model), **where)
    assert framework.ingest(alone, TEXTS).reused == 3


def test_a_recipe_next_to_the_store_is_found(
    framework: Framework, tmp_path: Path, saved_model: Path, recipe: Recipe
) -> None:
    recipe.save(tmp_path / "recipe")
    chat = framework.chat(str(saved_model), 2, kv_store=tmp_path / "kv")
    assert framework.ask(chat, "whole", QUESTION).reuse["recipe"] == str(recipe)


@WHOLE_OR_STREAM
def test_a_call_may_override_the_recipe(framework: Framework, how: How) -> None:
    chat = framework.chat(tuned_engine(), 6)
    for recipe in ("bos", recipe_of(chat.engine.model), Recipe(promote=1)):
        found = framework.ask(chat, how, QUESTION, recipe=recipe)
        own = BlockAttentionEngine(chat.engine.model, recipe=recipe)
        expected = framework.ask(framework.chat(own, 6), "whole", QUESTION)
        assert found.text == expected.text
        assert found.reuse["recipe"] == expected.reuse["recipe"]
    plain = framework.ask(chat, how, QUESTION).reuse
    assert found.reuse["hits"] + found.reuse["misses"] == plain["hits"] + plain["misses"] - 1


def test_invalid_recipes_are_refused_by_constructors(framework: Framework) -> None:
    engine = tuned_engine()
    with pytest.raises(ValueError, match="Found no recipe at nowhere"):
        framework.chat("bundled", recipe="nowhere")
    with pytest.raises(ValueError, match="Found no recipe at nowhere"):
        framework.ingestion(model="bundled", recipe="nowhere")
    with pytest.raises(ValueError, match="and engine=, which already has a recipe"):
        framework.chat(engine, recipe="bos")
    with pytest.raises(ValueError, match="and engine=, which already has a recipe"):
        framework.ingestion(engine=engine, recipe="bos")
    with pytest.raises(
        ValueError, match="only one of: llm=, a server, or a model with store and recipe"
    ):
        framework.ingestion(llm=framework.chat(engine), recipe="bos")
