"""Settings of a chat model: template variables, thoughts and profile."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.adapters.sources import EngineSource
from blockattn_rag.langchain import ChatBlockAttention, fields
from blockattn_rag.model import BlockModel
from blockattn_rag.store import MemoryStore
from tests.chat_templates import QWEN3
from tests.engines import tuned_model
from tests.langchain.conftest import tiny_block_model
from tests.models import tiny_model
from tests.saying import says, thinking_tokenizer

ANSWER = "<think>\nIt is deep.\n</think>\n\n31 metres."
ASKED = [("human", "How deep?")]
OFF = {"enable_thinking": False}


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return tuned_model(thinking_tokenizer())


@pytest.fixture
def chat(model: BlockModel) -> ChatBlockAttention:
    engine = BlockAttentionEngine(model, MemoryStore(1 << 28))
    return ChatBlockAttention(engine=engine, max_tokens=2)


def with_variables(
    chat: ChatBlockAttention, variables: dict[str, Any], **fields: Any
) -> ChatBlockAttention:
    own = {"chat_template_kwargs": variables}
    return ChatBlockAttention(engine=chat.engine, max_tokens=2, generate_kwargs=own, **fields)


def test_cached_answers_depend_on_template_variables(chat: ChatBlockAttention) -> None:
    cache = InMemoryCache()
    for kwargs in ({}, OFF):
        one = with_variables(chat, kwargs, cache=cache)
        one.invoke(ASKED)
        one.bind(chat_template_kwargs={"enable_thinking": True}).invoke(ASKED)
    assert len(cache._cache) == 4


def test_the_template_receives_earlier_thoughts(chat: ChatBlockAttention) -> None:
    earlier = chat.invoke(ASKED, **says(ANSWER))
    as_part = AIMessage([{"type": "reasoning", "reasoning": "It is deep."}, "31 metres."])
    for message in (earlier, as_part):
        final = chat.to_prompt([AIMessage("x"), message]).final
        assert "<think>\nIt is deep.\n</think>\n\n31 metres.<|end|>" in final


def test_the_profile_reports_limits_and_modalities(chat: ChatBlockAttention) -> None:
    profile: Any = chat.profile
    assert isinstance(profile, Mapping)
    assert profile["max_input_tokens"] == 4096
    assert profile.get("reasoning_output") is True
    assert {**profile}["image_inputs"] is False
    assert profile["tool_calling"] is False
    plain: Any = ChatBlockAttention(
        engine=BlockAttentionEngine(tiny_block_model(), MemoryStore(1 << 28))
    ).profile
    assert (plain["max_input_tokens"], plain["reasoning_output"]) == (8192, False)
    assert ChatBlockAttention(engine=chat.engine, profile={"max_input_tokens": 5}).profile == {
        "max_input_tokens": 5
    }


def test_the_profile_reports_tool_support() -> None:
    tokenizer = thinking_tokenizer()
    tokenizer.chat_template = QWEN3
    hf_model = tiny_model("llama")
    chat = ChatBlockAttention(model=hf_model, model_kwargs={"tokenizer": tokenizer})
    profile: Any = chat.profile
    assert (profile["tool_calling"], profile["tool_call_streaming"]) == (True, True)
    assert (profile["tool_choice"], profile["structured_output"]) == (True, True)


def test_the_profile_reports_structured_output(
    chat: ChatBlockAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Any = chat.profile
    assert (told["tool_choice"], told["structured_output"]) == (False, True)
    monkeypatch.setattr(fields, "find_spec", lambda _: None)
    without: Any = ChatBlockAttention(engine=chat.engine).profile
    assert (without["tool_choice"], without["structured_output"]) == (False, False)


def test_the_profile_is_read_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def tokens(self: EngineSource) -> int:
        read.append("config")
        return 7

    monkeypatch.setattr(EngineSource, "max_context_tokens", property(tokens))
    made = ChatBlockAttention(model="bundled")
    copied = copy.deepcopy(made)
    assert made.profile
    assert read == []
    assert copied.profile is not None
    assert (copied.profile["max_input_tokens"], read) == (7, ["config"])
    assert "'max_input_tokens': 7" in repr(made.profile)
