"""Prompts and messages without markers, for other models, user interfaces and logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue

from blockattn_rag.prompts.markers import strip_markers


def without_markers(value: Any) -> Any:
    """A prompt or messages with the markers of passages taken out of every text.

    For other models, user interfaces and logs: ``RunnableLambda(without_markers) | other_model``.

    Args:
        value: a string, a prompt value, a message, or a list of messages as chat models take it.
    """
    if isinstance(value, str):
        return strip_markers(value)
    if isinstance(value, StringPromptValue):
        return StringPromptValue(text=strip_markers(value.text))
    if isinstance(value, PromptValue):
        return ChatPromptValue(messages=[_clean(message) for message in value.to_messages()])
    if isinstance(value, BaseMessage):
        return _clean(value)
    if isinstance(value, Sequence):
        return [_clean(message) for message in convert_to_messages(value)]
    raise TypeError(f"expected a prompt or messages, found {type(value).__name__}")


def _clean(message: BaseMessage) -> BaseMessage:
    changed = {"content": _cleaned(message.content)}
    if isinstance(message, AIMessage):
        changed["tool_calls"] = _cleaned(message.tool_calls)
    return message.model_copy(update=changed)


def _cleaned(value: Any) -> Any:
    """A value with the markers taken out of every string in it."""
    if isinstance(value, str):
        return strip_markers(value)
    if isinstance(value, dict):
        return {key: _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value
