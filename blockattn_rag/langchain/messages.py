"""Conversion of LangChain messages to chat turns, and of answers to LangChain messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue

from blockattn_rag.adapters.exchange import ChatTurn, Step
from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.output import InvalidToolCall, ToolCall
from blockattn_rag.prompts.markers import own_markers, strip_markers, wrap

PROVIDER = "blockattn_rag"

_ROLES: dict[type[BaseMessage], str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}

# Content parts of assistant messages to skip, because a field of the message contains the same
# content, or because chat templates do not render them.
_UNSEEN_PARTS = (
    *("reasoning", "thinking", "tool_call", "tool_call_chunk", "tool_use"),
    "invalid_tool_call",
)

# LangChain's standard content, version 1, numbers the text parts of a stream from 0 and merges
# parts with the same number. Tool calls start at this number to stay separate.
_FIRST_CALL_OF_V1 = 1 << 20


def chat_turns(messages: Iterable[BaseMessage]) -> Iterator[ChatTurn]:
    """Convert messages to turns, with block markers around passages."""
    for message in messages:
        calls, thoughts, result_of = [], "", None
        if isinstance(message, AIMessage):
            calls = [ToolCall(c["name"], c["args"], c["id"] or "") for c in message.tool_calls]
            blocks = (block for block in message.content_blocks if block["type"] == "reasoning")
            thoughts = "".join(str(block.get("reasoning", "")) for block in blocks)
        elif isinstance(message, ToolMessage):
            result_of = message.tool_call_id
        name = message.name or ""
        yield ChatTurn(_role_of(message), _text_of(message), thoughts, calls, result_of, name)


def _role_of(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ValueError(f"Chat templates have no role for a {type(message).__name__}; remove it")


def _text_of(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        text = message.content
        if isinstance(message, ToolMessage) and not own_markers(text):
            text = _marked(text, message.artifact)
    else:
        text = "".join(_text_of_part(part, message) for part in message.content)
    invalid = message.invalid_tool_calls if isinstance(message, AIMessage) else []
    # Include invalid calls, so that the model can correct them.
    return "\n".join(part for part in (text, *(str(call["args"]) for call in invalid)) if part)


def _marked(content: str, artifact: Any) -> str:
    """Put block markers around the passages in a tool's result. ``artifact``: Its documents."""
    documents = artifact if isinstance(artifact, (list, tuple)) else ()
    marked, position = "", 0
    for document in documents:
        text = document.page_content.strip() if isinstance(document, Document) else ""
        # Match only complete lines, because a short text may also occur within another text.
        lines = re.compile(rf"(?:\A|\n)[^\S\n]*({re.escape(text)})[^\S\n]*(?=\n|\Z)")
        if text and (line := lines.search(content, position)):
            marked += content[position : line.start(1)] + wrap(text)
            position = line.end(1)
    return marked + content[position:]


def _text_of_part(part: str | dict[str, Any], message: BaseMessage) -> str:
    """Return a content part's text. Parts with a ``kv_handle`` are passages."""
    if isinstance(part, str):
        return part
    if part.get("type") == "text" and isinstance(text := part.get("text"), str):
        is_passage = HANDLE_KEY in part or HANDLE_KEY in (part.get("extras") or {})
        return wrap(text) if is_passage else text
    if isinstance(message, AIMessage) and part.get("type") in _UNSEEN_PARTS:
        return ""
    raise ValueError(
        f"This model supports only text, found {json.dumps(part, default=str)[:80]} in a "
        f"{message.type} message; remove this content part"
    )


def chat_result(step: Step, model_name: str | None) -> ChatResult:
    """Convert a complete answer. Reasoning is in ``additional_kwargs["reasoning_content"]``."""
    message = AIMessage(
        **_fields(step, model_name),
        tool_calls=[
            tool_call(name=call.name, args=call.arguments, id=call.id) for call in step.calls
        ],
        invalid_tool_calls=[
            invalid_tool_call(name=call.name, args=call.text, id=call.id, error=call.error)
            for call in step.invalid
        ],
    )
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=_ending(step))])


def chat_chunk(step: Step, model_name: str | None, *, is_v1: bool) -> ChatGenerationChunk:
    """Convert a step of a stream. Only the last chunk has usage metadata, because LangChain adds up
    the metadata of all chunks."""
    # Send each call in one chunk, because LangChain completes the JSON of partial arguments.
    # Invalid calls must not parse as JSON, or LangChain would treat them as valid.
    calls: list[tuple[ToolCall | InvalidToolCall, str]] = [
        (call, json.dumps(call.arguments, ensure_ascii=False)) for call in step.calls
    ]
    calls += [(call, f"{call.error}: {call.text}") for call in step.invalid]
    message = AIMessageChunk(
        **_fields(step, model_name),
        tool_call_chunks=[
            tool_call_chunk(name=call.name, args=arguments, id=call.id, index=index)
            for index, (call, arguments) in enumerate(calls, _FIRST_CALL_OF_V1 if is_v1 else 0)
        ],
        chunk_position="last" if step.generation else None,
    )
    return ChatGenerationChunk(message=message, generation_info=_ending(step))


def _ending(step: Step) -> dict[str, Any] | None:
    return {"finish_reason": step.generation.finish_reason} if step.generation else None


def _fields(step: Step, model_name: str | None) -> dict[str, Any]:
    """Return the fields that complete messages and chunks share."""
    thoughts = {"reasoning_content": step.thoughts} if step.thoughts else {}
    fields: dict[str, Any] = {"content": step.text, "additional_kwargs": thoughts}
    if step.generation is None:
        return fields
    stats = step.generation.stats
    computed = stats.computed_tokens if stats.mode == "block" else 0
    fields["usage_metadata"] = UsageMetadata(
        input_tokens=stats.prompt_tokens,
        output_tokens=stats.generated_tokens,
        total_tokens=stats.prompt_tokens + stats.generated_tokens,
        input_token_details=InputTokenDetails(
            cache_read=stats.reused_tokens, cache_creation=computed
        ),
    )
    fields["response_metadata"] = {
        "model_name": model_name or "unknown",
        "model_provider": PROVIDER,
        "finish_reason": step.generation.finish_reason,
        "block_attention": asdict(stats),
    }
    return fields


def without_markers(value: Any) -> Any:
    """Remove all block markers from a prompt or messages, for other models, interfaces and logs.

    Args:
        value: String, prompt value, message, or list of messages in any format that chat models
            accept.

    Raises:
        TypeError: The value has another type.
    """
    if isinstance(value, str):
        return strip_markers(value)
    if isinstance(value, StringPromptValue):
        return StringPromptValue(text=strip_markers(value.text))
    if isinstance(value, PromptValue):
        return ChatPromptValue(messages=without_markers(value.to_messages()))
    if isinstance(value, BaseMessage):
        changed = {"content": _cleaned(value.content)}
        if isinstance(value, AIMessage):
            changed["tool_calls"] = _cleaned(value.tool_calls)
        return value.model_copy(update=changed)
    if isinstance(value, Sequence):
        return [without_markers(message) for message in convert_to_messages(value)]
    raise TypeError(f"Expected a prompt or messages, found {type(value).__name__}")


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return strip_markers(value)
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value
