"""Answers in the format of vLLM, for tests of how this package rewrites them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any

from blockattn_rag.server.vllm.answers import ServedTools


class Definition(SimpleNamespace):
    """Stand-in for a tool or a tool choice in a vLLM request."""

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return dict(vars(self))


def chat_request(tools: Sequence[dict[str, Any]], **fields: Any) -> Any:
    """Return a vLLM request with these tools and all fields that affect tools."""
    request: dict[str, Any] = {
        "tools": [Definition(**tool) for tool in tools],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "model": "m",
        "return_token_ids": None,
        "response_format": None,
        "structured_outputs": None,
        "include_reasoning": True,
        "stop": None,
    }
    return SimpleNamespace(**{**request, **fields})


def whole_answer(tools: ServedTools, ids: Sequence[int]) -> dict[str, Any]:
    """Return the choice of a complete answer with these token ids. Its text must be ignored."""
    message = {"role": "assistant", "content": "not used", "tool_calls": []}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": [*ids]}
    data = {"choices": [choice], "prompt_token_ids": [1]}
    tools.answer(data)
    return choice


def streamed_answer(tools: ServedTools, ids: Sequence[int], size: int = 3) -> list[dict[str, Any]]:
    """Return the choices of a streamed answer in chunks of ``size`` tokens."""

    async def events() -> AsyncGenerator[str, None]:
        for at in range(0, len(ids), size):
            yield _event({"content": "not used"}, ids[at : at + size])
        yield _event({}, [], "stop")
        yield "data: [DONE]\n\n"

    async def read() -> list[str]:
        return [event async for event in tools.events(events())]

    *chunks, done = asyncio.run(read())
    assert done == "data: [DONE]\n\n"
    return [json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks]


def _event(delta: dict[str, str], ids: Sequence[int], reason: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "token_ids": [*ids], "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}\n\n"
