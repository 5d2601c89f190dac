"""Recipes as an argument of the model, of its calls, and in what is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.langchain import (
    BlockAttentionLLM,
    BlockKVCompressor,
    BlockKVTransformer,
    ChatBlockAttention,
    format_blocks,
)
from blockattn_rag.model import BlockModel
from tests.engines import local
from tests.langchain.conftest import passages
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of

MESSAGES = [("system", format_blocks(passages())), ("human", "Which?")]


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is not block-fine-tuned."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def reuse(message: Any) -> dict[str, Any]:
    figures: dict[str, Any] = message.response_metadata["block_attention"]
    return figures


def test_the_constructors_have_few_arguments() -> None:
    own = {
        "model", "engine", "kv_store", "recipe", "block_template", "base_url", "api_key",
        "model_kwargs", "mode", "max_tokens", "temperature", "stop", "streaming", "generate_kwargs",
    }  # fmt: skip
    inherited = set(BaseChatModel.model_fields)
    fields = {
        field.alias or name
        for name, field in ChatBlockAttention.model_fields.items()
        if name not in inherited
    }
    names = {"max_new_tokens": "max_tokens", "stop_sequences": "stop"}
    found = {names.get(name, name) for name in fields} - {"source"}
    assert found | {"engine", "api_key"} == own
    assert len(own) == 14
    assert BlockAttentionLLM.model_fields.keys() - ChatBlockAttention.model_fields.keys() == set()


def test_the_model_and_its_ingestion_run_with_the_recipe(tmp_path: Path, saved_model: Path) -> None:
    model = BlockModel.from_pretrained(saved_model)
    recipe = recipe_of(model)
    recipe.save(tmp_path / "mine")
    chat = ChatBlockAttention(
        model=str(saved_model), kv_store=tmp_path / "kv", recipe=tmp_path / "mine", max_tokens=6
    )
    BlockKVTransformer(llm=chat).transform_documents(passages())
    answer = chat.invoke(MESSAGES)
    assert (reuse(answer)["hits"], reuse(answer)["misses"]) == (3, 1)  # the text before them
    assert reuse(answer)["recipe"] == str(recipe)
    assert local(chat.engine).recipe == recipe
    compressor = BlockKVCompressor(llm=chat, warm=True)
    compressor.compress_documents(passages(), "Which?")
    warmed = compressor.wait_until_warm()
    assert warmed is not None
    assert warmed.reused == 3


def test_a_recipe_beside_the_store_is_found(tmp_path: Path, saved_model: Path) -> None:
    recipe = recipe_of(BlockModel.from_pretrained(saved_model))
    recipe.save(tmp_path / "recipe")
    chat = ChatBlockAttention(model=str(saved_model), kv_store=tmp_path / "kv", max_tokens=2)
    assert reuse(chat.invoke(MESSAGES))["recipe"] == str(recipe)


def test_a_call_may_have_another_recipe(chat: ChatBlockAttention) -> None:
    prompt = chat.to_prompt(chat._convert_input(MESSAGES).to_messages())
    for recipe in ("bos", recipe_of(local(chat.engine).model), Recipe(promote=1)):
        expected = chat.engine.generate(prompt, max_new_tokens=6, recipe=recipe)
        assert chat.invoke(MESSAGES, recipe=recipe).content == expected.text
        assert chat.bind(recipe=recipe).invoke(MESSAGES).content == expected.text
        *_, last = chat.stream(MESSAGES, recipe=recipe)
        assert reuse(last)["recipe"] == expected.stats.recipe
    assert reuse(last)["promoted_tokens"] > 40


def test_what_is_no_recipe_is_refused_at_once(chat: ChatBlockAttention) -> None:
    for kind in (ChatBlockAttention, BlockKVTransformer):
        with pytest.raises(ValueError, match="Found no recipe at nowhere"):
            kind(model="bundled", recipe="nowhere")
    with pytest.raises(ValueError, match="beside engine=, which has its own"):
        ChatBlockAttention(engine=chat.engine, recipe="bos")
    with pytest.raises(ValueError, match="either llm=, or the model, store and recipe"):
        BlockKVTransformer(llm=chat, recipe="bos")


def test_an_answer_cache_tells_recipes_of_engines_apart(chat: ChatBlockAttention) -> None:
    cache, engine = InMemoryCache(), local(chat.engine)

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


def test_an_answer_cache_tells_models_of_one_name_apart() -> None:
    engines = [
        BlockAttentionEngine(BlockModel(tiny_model(seed=n), tiny_tokenizer())) for n in (0, 1)
    ]
    one, other = (ChatBlockAttention(engine=engine) for engine in engines)
    assert one.model_name == other.model_name
    assert one._identifying_params != other._identifying_params


def test_an_answer_cache_tells_recipes_apart_that_will_be_found(tmp_path: Path) -> None:
    """Without loading the model, which a cached answer does not need."""
    found = []
    for recipe in (None, Recipe("bos"), Recipe("head:4")):
        if recipe is not None:
            recipe.save(tmp_path / "recipe")
        for given in ("auto", "bos", tmp_path / "recipe")[: 2 if recipe is None else 3]:
            chat = ChatBlockAttention(model="nowhere", kv_store=tmp_path / "kv", recipe=given)
            assert chat._identifying_params == chat._identifying_params
            found.append(str(chat._identifying_params["engine"]))
    none, bos, beside, bos_again, own, other, bos_too, other_own = found
    assert bos == bos_again == bos_too == beside == own  # one digest: that of the sink alone
    assert other == other_own
    assert len({none, bos, other}) == 3
