"""LangChain and LlamaIndex behind one interface, for tests of the behavior that they share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing
from functools import reduce
from operator import add
from typing import Any, Literal, NamedTuple

import pytest
from langchain_core.documents import Document
from langchain_core.messages import AIMessage
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, ThinkingBlock, ToolCallBlock
from llama_index.core.schema import BaseNode, TextNode

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.langchain import BlockKVTransformer, ChatBlockAttention
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform
from blockattn_rag.llama_index.messages import INVALID_CALLS
from blockattn_rag.prompts.blocks import BlockPrompt

How = Literal["whole", "stream", "awaited", "awaited stream"]
EVERY_WAY = pytest.mark.parametrize("how", ["whole", "stream", "awaited", "awaited stream"])
WHOLE_OR_STREAM = pytest.mark.parametrize("how", ["whole", "stream"])
AWAITED = pytest.mark.parametrize("how", ["awaited", "awaited stream"])


class Answer(NamedTuple):
    """Answer from either framework."""

    text: str
    calls: list[tuple[str, dict[str, Any]]]
    invalid: list[tuple[str | None, str, str]]
    """Tool, error and text of each invalid call."""
    thoughts: str
    finish_reason: str
    reuse: dict[str, Any]


class LangChain:
    """Chat models and ingestion of LangChain."""

    def chat(
        self, source: BlockAttentionEngine | str, max_tokens: int = 400, **arguments: Any
    ) -> Any:
        """Return a chat model over an engine, or over the model with this name."""
        own = {"model" if isinstance(source, str) else "engine": source}
        return ChatBlockAttention(max_tokens=max_tokens, **own, **arguments)

    def ask(self, chat: Any, how: How, question: str = "Well?", **options: Any) -> Answer:
        """Ask a question. ``options`` go to the call, such as ``tools`` in OpenAI's format."""
        if how == "whole":
            return self._read(chat.invoke(question, **options))
        if how == "stream":
            return self._read(reduce(add, self.stream(chat, question, **options)))
        return asyncio.run(self.aask(chat, how, question, **options))

    async def aask(self, chat: Any, how: How, question: str = "Well?", **options: Any) -> Answer:
        """Asynchronous version of ``ask``."""
        if how == "awaited":
            return self._read(await chat.ainvoke(question, **options))
        async with aclosing(self.astream(chat, question, **options)) as chunks:
            return self._read(reduce(add, [chunk async for chunk in chunks]))

    def stream(self, chat: Any, question: str, **options: Any) -> Generator[Any, None, None]:
        """Yield the chunks of an answer."""
        yield from chat.stream(question, **options)

    async def astream(self, chat: Any, question: str, **options: Any) -> AsyncGenerator[Any, None]:
        """Asynchronous version of ``stream``."""
        async with aclosing(chat.astream(question, **options)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _read(self, message: AIMessage) -> Answer:
        metadata = message.response_metadata
        return Answer(
            str(message.content),
            [(one["name"], one["args"]) for one in message.tool_calls],
            [_invalid(one) for one in message.invalid_tool_calls],
            message.additional_kwargs.get("reasoning_content", ""),
            metadata["finish_reason"],
            metadata["block_attention"],
        )

    def prompt(self, chat: Any, *turns: tuple[str, str]) -> BlockPrompt:
        """Return the prompt for a conversation of roles and texts."""
        prompt: BlockPrompt = chat.to_prompt(chat._convert_input(turns).to_messages())
        return prompt

    def ingestion(self, **arguments: Any) -> Any:
        """Return an ingestion step."""
        return BlockKVTransformer(**arguments)

    def ingest(self, step: Any, texts: Sequence[str]) -> EncodeStats:
        """Ingest texts. Returns the statistics of the step."""
        step.transform_documents([Document(text) for text in texts])
        stats: EncodeStats = step.stats
        return stats


def _invalid(call: Any) -> tuple[str | None, str, str]:
    """Return tool, error and text of an invalid call. Streams put the error before the text."""
    error, _, text = f"{call['error'] or ''}: {call['args']}".removeprefix(": ").partition(": ")
    return call["name"], error, text


class LlamaIndex:
    """LLMs and ingestion of LlamaIndex."""

    def chat(
        self, source: BlockAttentionEngine | str, max_tokens: int = 400, **arguments: Any
    ) -> Any:
        own: Any = {"model_name" if isinstance(source, str) else "engine": source}
        return BlockAttentionLLM(max_new_tokens=max_tokens, **own, **arguments)

    def ask(self, chat: Any, how: How, question: str = "Well?", **options: Any) -> Answer:
        if how == "whole":
            return self._read(chat.chat([ChatMessage(question)], **options))
        if how == "stream":
            return self._read(*self.stream(chat, question, **options))
        return asyncio.run(self.aask(chat, how, question, **options))

    async def aask(self, chat: Any, how: How, question: str = "Well?", **options: Any) -> Answer:
        if how == "awaited":
            return self._read(await chat.achat([ChatMessage(question)], **options))
        async with aclosing(self.astream(chat, question, **options)) as steps:
            return self._read(*[step async for step in steps])

    def stream(self, chat: Any, question: str, **options: Any) -> Generator[Any, None, None]:
        yield from chat.stream_chat([ChatMessage(question)], **options)

    async def astream(self, chat: Any, question: str, **options: Any) -> AsyncGenerator[Any, None]:
        async with aclosing(await chat.astream_chat([ChatMessage(question)], **options)) as steps:
            async for step in steps:
                yield step

    def _read(self, *steps: ChatResponse) -> Answer:
        raw: Any = steps[-1].raw
        message = steps[-1].message
        invalid = message.additional_kwargs.get(INVALID_CALLS, [])
        text = message.content or ""
        if len(steps) > 1 and not invalid:
            assert "".join(step.delta or "" for step in steps) == text
        for one in invalid:  # LlamaIndex appends invalid calls to the text
            text = text.removesuffix(one["text"]).rstrip("\n")
        return Answer(
            text,
            [(b.tool_name, b.tool_kwargs) for b in message.blocks if isinstance(b, ToolCallBlock)],  # type: ignore[misc]
            [(one["name"], one["error"], one["text"]) for one in invalid],
            "".join(b.content or "" for b in message.blocks if isinstance(b, ThinkingBlock)),
            raw["finish_reason"],
            raw["usage"],
        )

    def prompt(self, chat: Any, *turns: tuple[str, str]) -> BlockPrompt:
        prompt: BlockPrompt = chat.to_prompt([ChatMessage(text, role=role) for role, text in turns])
        return prompt

    def ingestion(self, **arguments: Any) -> Any:
        model = arguments.pop("model", None)
        return BlockKVTransform(model, **arguments)

    def ingest(self, step: Any, texts: Sequence[str]) -> EncodeStats:
        nodes: list[BaseNode] = [TextNode(text=text) for text in texts]
        step(nodes)
        stats: EncodeStats = step.stats
        return stats


Framework = LangChain | LlamaIndex
FRAMEWORKS: dict[str, Framework] = {"langchain": LangChain(), "llama_index": LlamaIndex()}
EACH = pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
