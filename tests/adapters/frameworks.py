"""Both frameworks behind one interface, for tests of behaviour that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial, reduce
from operator import add
from typing import Any, Literal, NamedTuple

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ThinkingBlock, ToolCallBlock
from llama_index.core.schema import BaseNode, TextNode

from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.langchain import BlockKVTransformer, ChatBlockAttention
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform
from blockattn_rag.llama_index.messages import INVALID_CALLS

How = Literal["whole", "stream", "awaited", "awaited stream"]
EVERY_WAY = pytest.mark.parametrize("how", ["whole", "stream", "awaited", "awaited stream"])
WHOLE_OR_STREAM = pytest.mark.parametrize("how", ["whole", "stream"])


class Answer(NamedTuple):
    """An answer of either framework."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    invalid: list[tuple[str | None, str, str]]
    """Tool, error and text of each invalid call."""
    thoughts: str
    finish_reason: str
    reuse: dict[str, Any]


class LangChain:
    """Chat models and ingestion of LangChain."""

    def chat(self, source: Engine | str, max_tokens: int = 400, **arguments: Any) -> Any:
        """A chat model with a ready engine, or the name of a model."""
        own = {"model" if isinstance(source, str) else "engine": source}
        return ChatBlockAttention(max_tokens=max_tokens, **own, **arguments)

    def ask(self, chat: Any, how: How, question: str = "Well?", **options: Any) -> Answer:
        """Ask with options of the call, among them OpenAI's definitions of ``tools``."""
        message: AIMessage
        match how:
            case "whole":
                message = chat.invoke(question, **options)
            case "awaited":
                message = asyncio.run(chat.ainvoke(question, **options))
            case "stream":
                message = reduce(add, chat.stream(question, **options))
            case "awaited stream":
                stream = partial(chat.astream, question, **options)
                message = reduce(add, asyncio.run(_collected(stream)))
        metadata = message.response_metadata
        return Answer(
            str(message.content),
            [(one["name"], one["args"]) for one in message.tool_calls],
            [_invalid(one) for one in message.invalid_tool_calls],
            message.additional_kwargs.get("reasoning_content", ""),
            metadata["finish_reason"],
            metadata["block_attention"],
        )

    def ingestion(self, **arguments: Any) -> Any:
        return BlockKVTransformer(**arguments)

    def ingest(self, step: Any, texts: Sequence[str]) -> EncodeStats:
        step.transform_documents([Document(text) for text in texts])
        stats: EncodeStats = step.stats
        return stats


def _invalid(call: Any) -> tuple[str | None, str, str]:
    """An invalid call, whose error a stream puts before its text."""
    error, _, text = f"{call['error'] or ''}: {call['args']}".removeprefix(": ").partition(": ")
    return call["name"], error, text


class LlamaIndex:
    """The same of LlamaIndex."""

    def chat(self, source: Engine | str, max_tokens: int = 400, **arguments: Any) -> Any:
        own: Any = {"model_name" if isinstance(source, str) else "engine": source}
        return BlockAttentionLLM(max_new_tokens=max_tokens, **own, **arguments)

    def ask(self, chat: Any, how: How, question: str = "Well?", **options: Any) -> Answer:
        messages = [ChatMessage(question)]
        response: ChatResponse
        match how:
            case "whole":
                response = chat.chat(messages, **options)
            case "awaited":
                response = asyncio.run(chat.achat(messages, **options))
            case "stream":
                response = _last(list(chat.stream_chat(messages, **options)))
            case "awaited stream":
                response = _last(asyncio.run(_astream_chat(chat, messages, options)))
        raw: Any = response.raw
        message = response.message
        invalid = message.additional_kwargs.get(INVALID_CALLS, [])
        text = message.content or ""
        for one in invalid:  # which LlamaIndex shows in the text
            text = text.removesuffix(one["text"]).rstrip("\n")
        return Answer(
            text,
            [(b.tool_name, b.tool_kwargs) for b in message.blocks if isinstance(b, ToolCallBlock)],  # type: ignore[misc]
            [(one["name"], one["error"], one["text"]) for one in invalid],
            "".join(b.content or "" for b in message.blocks if isinstance(b, ThinkingBlock)),
            raw["finish_reason"],
            raw["usage"],
        )

    def ingestion(self, **arguments: Any) -> Any:
        model = arguments.pop("model", None)
        return BlockKVTransform(model, **arguments)

    def ingest(self, step: Any, texts: Sequence[str]) -> EncodeStats:
        nodes: list[BaseNode] = [TextNode(text=text) for text in texts]
        step(nodes)
        stats: EncodeStats = step.stats
        return stats


async def _collected(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream()]


async def _astream_chat(
    chat: BlockAttentionLLM, messages: list[ChatMessage], options: dict[str, Any]
) -> list[ChatResponse]:
    return [step async for step in await chat.astream_chat(messages, **options)]


def _last(steps: list[ChatResponse]) -> ChatResponse:
    """The last step of a stream, whose deltas are the texts of its steps."""
    deltas = "".join(step.delta or "" for step in steps)
    shown = steps[-1].message
    if INVALID_CALLS not in shown.additional_kwargs:
        assert deltas == (shown.content or "")
    return steps[-1]


Framework = LangChain | LlamaIndex
FRAMEWORKS: dict[str, Framework] = {"langchain": LangChain(), "llama_index": LlamaIndex()}
EACH = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
