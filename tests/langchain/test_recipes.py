"""Recipes of chat models and of single calls, and how they are reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from blockattn_rag.model import BlockModel
from tests.langchain.conftest import passages
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

MESSAGES = [("system", format_blocks(passages())), ("human", "Which?")]


def test_the_constructors_have_few_arguments() -> None:
    own = {
        "model", "engine", "kv_store", "recipe", "block_template",
        "model_kwargs", "max_tokens", "temperature", "stop", "recognize", "generate_kwargs",
    }  # fmt: skip
    own.add("streaming")  # required by LangChain's test suite
    fields = {*ChatBlockAttention.model_fields} - {*BaseChatModel.model_fields}
    arguments = {"model" if name == "model_name" else name for name in fields}
    assert arguments - {"source"} | {"engine"} == own
    assert len(own) == 12


def test_cached_answers_depend_on_the_recipe_of_the_engine(chat: ChatBlockAttention) -> None:
    cache, engine = InMemoryCache(), chat.engine

    def ask(recipe: Any, **fields: Any) -> str:
        own = BlockAttentionEngine(engine.model, engine.store, recipe=recipe)
        model = ChatBlockAttention(engine=own, max_tokens=6, cache=cache, **fields)
        return str(model.invoke(MESSAGES).content)

    adapted = recipe_of(engine.model)
    answers = [ask("none"), ask("bos"), ask(adapted), ask(replace(adapted, promote=1))]
    assert len(cache._cache) == 4
    assert [ask("none"), ask("bos"), ask(adapted), ask(replace(adapted, promote=1))] == answers
    assert len(cache._cache) == 4
    ask(recipe_of(engine.model, size=0.2))
    assert len(cache._cache) == 5


def test_cached_answers_distinguish_models_with_the_same_name() -> None:
    engines = [
        BlockAttentionEngine(BlockModel(tiny_model(seed=n), tiny_tokenizer())) for n in (0, 1)
    ]
    one, other = (ChatBlockAttention(engine=engine) for engine in engines)
    assert one.model_name == other.model_name
    assert one._identifying_params != other._identifying_params


def test_cached_answers_depend_on_the_recipe(saved: str, tmp_path: Path) -> None:
    found = []
    for recipe in (None, Recipe("bos"), Recipe("head:4")):
        if recipe is not None:
            recipe.save(tmp_path / "recipe")
        for given in ("auto", "bos", tmp_path / "recipe")[: 2 if recipe is None else 3]:
            chat = ChatBlockAttention(model=saved, kv_store=tmp_path / "kv", recipe=given)
            assert chat._identifying_params == chat._identifying_params
            found.append(str(chat._identifying_params["engine"]))
    none, bos, beside, bos_again, own, other, bos_too, other_own = found
    assert bos == bos_again == bos_too == own  # same digest, because the recipes only set the sink
    # "auto" may also choose the settings for stock models.
    assert len({none, bos, beside, other, other_own}) == 5
