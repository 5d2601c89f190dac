"""Settings of a chat model: template variables, thoughts, profile and recipe."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage

from blockattn_rag import BlockAttentionEngine, Recipe
from blockattn_rag.langchain import ChatBlockAttention, fields, format_blocks
from blockattn_rag.model import BlockModel
from blockattn_rag.store import MemoryStore
from tests.engines import tuned_model
from tests.langchain.conftest import passages, scripted
from tests.models import tiny_model, tiny_tokenizer
from tests.recipes import recipe_of
from tests.saying import says, thinking_tokenizer

ANSWER = "<think>\nIt is deep.\n</think>\n\n31 metres."
ASKED = [("human", "How deep?")]
MESSAGES = [("system", format_blocks(passages())), ("human", "Which?")]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tuned_model(thinking_tokenizer())


@pytest.fixture
def thinking(model: BlockModel) -> ChatBlockAttention:
    engine = BlockAttentionEngine(model, MemoryStore(1 << 28))
    return ChatBlockAttention(engine=engine, max_tokens=2)


def test_cached_answers_depend_on_template_variables(thinking: ChatBlockAttention) -> None:
    cache = InMemoryCache()
    for variables in ({}, {"enable_thinking": False}):
        options = {"chat_template_kwargs": variables}
        one = ChatBlockAttention(engine=thinking.engine, generate_kwargs=options, cache=cache)
        one.invoke(ASKED, max_tokens=2)
        one.bind(max_tokens=2, chat_template_kwargs={"enable_thinking": True}).invoke(ASKED)
    assert len(cache._cache) == 4


def test_the_template_receives_earlier_thoughts(thinking: ChatBlockAttention) -> None:
    earlier = thinking.invoke(ASKED, **says(ANSWER))
    as_part = AIMessage([{"type": "reasoning", "reasoning": "It is deep."}, "31 metres."])
    for message in (earlier, as_part):
        final = thinking.to_prompt([AIMessage("x"), message]).final
        assert "<think>\nIt is deep.\n</think>\n\n31 metres.<|end|>" in final


def test_the_profile_reports_limits_and_modalities(
    thinking: ChatBlockAttention, engine: BlockAttentionEngine
) -> None:
    profile: Any = thinking.profile
    assert (profile["max_input_tokens"], profile["image_inputs"]) == (4096, False)
    assert (profile["reasoning_output"], profile["tool_calling"]) == (True, False)
    plain: Any = ChatBlockAttention(engine=engine).profile
    assert (plain["max_input_tokens"], plain["reasoning_output"]) == (8192, False)
    own = ChatBlockAttention(engine=engine, profile={"max_input_tokens": 5})
    assert own.profile == {"max_input_tokens": 5}


def test_the_profile_reports_tools_and_structured_output(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tool_calling", "tool_call_streaming", "tool_choice", "structured_output")
    profile: Any = scripted("").profile
    assert [profile[name] for name in names] == [True] * 4
    monkeypatch.setattr(fields, "find_spec", lambda _: None)  # the extra is not installed
    profile = scripted("").profile
    assert [profile[name] for name in names] == [True, True, False, False]


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
