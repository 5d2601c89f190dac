"""Prompts of the OpenAI route: the same as those of the local adapters, and those of front ends."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import ChatBlockAttention, format_blocks
from blockattn_rag.output.tool_templates import tool_template
from blockattn_rag.prompts.blocks import STORED
from blockattn_rag.prompts.recognition import marked_sources
from blockattn_rag.server.vllm.bodies import ChatBody
from blockattn_rag.server.vllm.openai import Prompts
from tests.chat_templates import GRANITE33, LLAMA31, QWEN3, QWEN25
from tests.engines import tuned_model
from tests.hostile.texts import ODDITIES, TURNS
from tests.models import tiny_tokenizer

PROMPTS = 200
HOSTILE = [text for text in (*TURNS, *ODDITIES) if text != "\ud800"]
TEMPLATES = {"Qwen 2.5": QWEN25, "Qwen 3": QWEN3, "Llama 3.1": LLAMA31, "Granite": GRANITE33}
TOOL = {
    "type": "function",
    "function": {
        "name": "measure",
        "description": "Measure a tower.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
    },
}


@lru_cache
def chat_of(name: str) -> ChatBlockAttention:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    return ChatBlockAttention(engine=BlockAttentionEngine(tuned_model(tokenizer)))


def conversation(draw: random.Random, with_tools: bool) -> list[BaseMessage]:
    """Generate messages with passages, earlier turns, calls and results, some of them hostile."""

    def text() -> str:
        words = draw.choice(("Halden Tower is 214 m.", "How tall?", " a\n\n b ", "Ünï 🙂"))
        return draw.choice(HOSTILE) + words if draw.random() < 0.5 else words

    def passages() -> str:
        count = draw.randint(0, 3)
        return format_blocks([Document(text()) for _ in range(count)]) if count else ""

    messages: list[BaseMessage] = []
    if draw.random() < 0.6:
        messages.append(SystemMessage(f"Be brief.\n{passages()}{text()}"))
    for _ in range(draw.randint(0, 2)):
        messages += [HumanMessage(passages() + text()), AIMessage(text())]
    if with_tools and draw.random() < 0.7:
        call = {"name": "measure", "args": {"name": text()}, "id": "c1"}
        messages += [HumanMessage(text()), AIMessage("", tool_calls=[call])]
        messages.append(ToolMessage(passages() + text(), tool_call_id="c1"))
    return [*messages, HumanMessage(passages() + text())]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_route_builds_the_same_prompts_as_the_adapter(name: str) -> None:
    chat = chat_of(name)
    tokenizer = chat.source.tokenizer.tokenizer
    assert tool_template(tokenizer) is not None
    prompts = Prompts(tokenizer)
    client = ChatOpenAI(model="m", base_url="http://127.0.0.1:9", api_key=SecretStr("none"))
    cut = 0
    for seed in range(PROMPTS // len(TEMPLATES)):
        draw = random.Random(f"{name} {seed}")
        with_tools = draw.random() < 0.5
        messages = conversation(draw, with_tools)
        tools = [TOOL] if with_tools else []
        expected = chat.source.tokenizer.prompt_ids(chat.to_prompt(messages, tools=tools))
        bound: dict[str, Any] = {"tools": tools} if tools else {}
        body = ChatBody.from_dict(client._get_request_payload(messages, **bound))
        found = prompts.token_ids(prompts.chat(body, tools, {}), "block")
        assert found.token_ids == expected.flat, messages
        assert found.lengths == tuple(map(len, expected.context)), messages
        cut += bool(found.lengths)
    assert cut > PROMPTS // len(TEMPLATES) // 2


# Two turns of each front end. The second turn repeats the first passage of the first turn, in
# another place and with another number.
FRONT_ENDS = json.loads((Path(__file__).parents[1] / "front_ends.json").read_text())
ROUTE = Prompts(tiny_tokenizer())


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_a_repeated_source_has_the_same_tokens_in_another_place(name: str) -> None:
    turns = []
    for messages in FRONT_ENDS[name]:
        prompt = ROUTE.chat(ChatBody.from_dict({"messages": messages}), [], {}, marked_sources)
        tokens = ROUTE.token_ids(prompt, "block")
        ids = iter(tokens.token_ids)
        blocks = [[*islice(ids, length)] for length in tokens.lengths]
        turns.append([ids for ids, keep in zip(blocks, tokens.keep, strict=True) if keep == STORED])
    (first, _), (_, second) = turns
    assert first == second
    assert "The height of Halden Tower is 214 metres." in ROUTE.tokenizer.decode(first)
