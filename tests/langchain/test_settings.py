"""Settings of a chat model: template variables, thoughts and profile."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, fields
from blockattn_rag.model import BlockModel
from blockattn_rag.store import MemoryStore
from tests.engines import tuned_model
from tests.langchain.conftest import scripted
from tests.saying import says, thinking_tokenizer

ANSWER = "<think>\nIt is deep.\n</think>\n\n31 metres."
ASKED = [("human", "How deep?")]


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tuned_model(thinking_tokenizer())


@pytest.fixture
def chat(model: BlockModel) -> ChatBlockAttention:
    engine = BlockAttentionEngine(model, MemoryStore(1 << 28))
    return ChatBlockAttention(engine=engine, max_tokens=2)


def test_cached_answers_depend_on_template_variables(chat: ChatBlockAttention) -> None:
    cache = InMemoryCache()
    for variables in ({}, {"enable_thinking": False}):
        options = {"chat_template_kwargs": variables}
        one = ChatBlockAttention(engine=chat.engine, generate_kwargs=options, cache=cache)
        one.invoke(ASKED, max_tokens=2)
        one.bind(max_tokens=2, chat_template_kwargs={"enable_thinking": True}).invoke(ASKED)
    assert len(cache._cache) == 4


def test_the_template_receives_earlier_thoughts(chat: ChatBlockAttention) -> None:
    earlier = chat.invoke(ASKED, **says(ANSWER))
    as_part = AIMessage([{"type": "reasoning", "reasoning": "It is deep."}, "31 metres."])
    for message in (earlier, as_part):
        final = chat.to_prompt([AIMessage("x"), message]).final
        assert "<think>\nIt is deep.\n</think>\n\n31 metres.<|end|>" in final


def test_the_profile_reports_limits_and_modalities(
    chat: ChatBlockAttention, engine: BlockAttentionEngine
) -> None:
    profile: Any = chat.profile
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
