"""Conversion of LlamaIndex messages to chat turns, and of answers to LlamaIndex responses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import SerializerFunctionWrapHandler, model_serializer
from llama_index.core.instrumentation.events import BaseEvent
from llama_index_instrumentation import get_dispatcher

from blockattn_rag.adapters.exchange import ChatTurn, Step
from blockattn_rag.engine.results import ReuseStats
from blockattn_rag.output import ToolCall

dispatcher = get_dispatcher(__name__)

INVALID_CALLS = "invalid_tool_calls"
"""Key in a message's ``additional_kwargs`` for an answer's invalid tool calls. Each has its
``text``, the ``error``, and the tool's ``name`` if it could be parsed."""

# Role names of some providers, mapped to the roles of chat templates.
_TEMPLATE_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
}

_FIGURES = frozenset(field.name for field in fields(ReuseStats))


def chat_turns(messages: Iterable[ChatMessage]) -> Iterator[ChatTurn]:
    """Convert messages to turns. The text keeps its block markers."""
    for message in messages:
        role = _TEMPLATE_ROLES.get(message.role, message.role.value)
        thoughts = (block.content for block in message.blocks if isinstance(block, ThinkingBlock))
        call_id = message.additional_kwargs.get("tool_call_id", "")
        yield ChatTurn(
            role,
            _text_of(message),
            thoughts="".join(filter(None, thoughts)),
            calls=[_call_of(block) for block in message.blocks if isinstance(block, ToolCallBlock)],
            result_of=str(call_id) if role == "tool" else None,
        )


def _call_of(block: ToolCallBlock) -> ToolCall:
    arguments = block.tool_kwargs
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(
                f"Found an earlier call of {block.tool_name} whose arguments are not JSON "
                f"({error}): {arguments[:80]!r}; remove it from the history"
            ) from error
    return ToolCall(block.tool_name, arguments, block.tool_call_id or "")


def _text_of(message: ChatMessage) -> str:
    texts = []
    for block in message.blocks:
        if isinstance(block, (ToolCallBlock, ThinkingBlock)):
            continue
        if not isinstance(block, TextBlock):
            raise ValueError(
                f"BlockAttentionLLM supports only text, found a {type(block).__name__} in a "
                f"{message.role.value} message; remove the block"
            )
        texts.append(block.text)
    return "\n".join(texts)


class BlockReuseEvent(BaseEvent):
    """Event at the end of an answer, with its reuse statistics, such as ``event.hits``."""

    stats: ReuseStats

    @classmethod
    def class_name(cls) -> str:
        return "BlockReuseEvent"

    def __getattr__(self, name: str) -> Any:
        if name in _FIGURES:
            return getattr(self.stats, name)
        return super().__getattr__(name)  # type: ignore[misc]

    @model_serializer(mode="wrap")
    def _flat(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        figures: dict[str, Any] = written.pop("stats")
        return {**written, **figures}


class Responses:
    """Converts an answer's steps to responses, and dispatches ``BlockReuseEvent`` after the last.
    ``streamed``: Whether to set the ``delta`` of responses."""

    def __init__(self, *, streamed: bool = False) -> None:
        self._streamed = streamed
        self._text = ""
        self._thoughts = ""

    def completion(self, step: Step) -> CompletionResponse:
        fields = self._take(step)
        return CompletionResponse(text=self._text, **fields)

    def chat(self, step: Step) -> ChatResponse:
        fields = self._take(step)
        # Include invalid calls, so that the text contains the model's complete output.
        text = "\n".join(filter(None, (self._text, *(call.text for call in step.invalid))))
        blocks: list[ThinkingBlock | TextBlock | ToolCallBlock] = []
        if self._thoughts:
            blocks.append(ThinkingBlock(content=self._thoughts))
        if text or not step.calls:
            blocks.append(TextBlock(text=text))
        blocks += [
            ToolCallBlock(tool_call_id=call.id, tool_name=call.name, tool_kwargs=call.arguments)
            for call in step.calls
        ]
        extra = {INVALID_CALLS: [asdict(call) for call in step.invalid]} if step.invalid else {}
        message = ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)
        return ChatResponse(message=message, **fields)

    def _take(self, step: Step) -> dict[str, Any]:
        """Add a step. Returns the fields that completion and chat responses share."""
        self._text += step.text
        self._thoughts += step.thoughts
        fields: dict[str, Any] = {}
        if self._thoughts:
            thinking = {"thinking": self._thoughts, "thinking_delta": step.thoughts or None}
            fields["additional_kwargs"] = thinking
        if self._streamed:
            fields["delta"] = step.text
        if (generation := step.generation) is not None:
            dispatcher.event(BlockReuseEvent(stats=generation.stats))
            reason = generation.finish_reason
            fields["raw"] = {"usage": _usage_of(generation.stats), "finish_reason": reason}
        return fields


def _usage_of(stats: ReuseStats) -> dict[str, Any]:
    """Token counts, with the names that LlamaIndex's counters expect, and reuse statistics."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "cached_tokens": stats.reused_tokens,
        **asdict(stats),
    }
