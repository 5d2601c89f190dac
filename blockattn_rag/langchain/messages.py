"""Messages: from LangChain's to the form that chat templates take, and answers back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.engine.results import Generation
from blockattn_rag.langchain.fields import PROVIDER
from blockattn_rag.prompts.markers import own_markers, wrap

_ROLES: dict[type[BaseMessage], str] = {
    HumanMessage: "user",
    AIMessage: "assistant",
    SystemMessage: "system",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}

# Parts of an assistant's message that chat templates do not show again, or that are fields of it.
_UNSEEN_PARTS = (
    *("reasoning", "thinking", "tool_call", "tool_call_chunk", "tool_use"),
    "invalid_tool_call",
)


def as_template_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Messages as ``{"role", "content"}``, with calls of tools and the ids of results; passages
    stand between block markers.

    Raises:
        ValueError: a message holds an image or anything else that is not text.
    """
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools that were called, by the calls' ids
    for message in messages:
        calls = message.tool_calls if isinstance(message, AIMessage) else []
        names |= {call["id"]: call["name"] for call in calls if call["id"]}
        turn = {"role": _role_of(message), "content": _text_of(message), **_thoughts_of(message)}
        turns.append({**turn, **_tool_fields(message, names)})
    return turns


def _role_of(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return message.role
    for kind, role in _ROLES.items():
        if isinstance(message, kind):
            return role
    raise ValueError(f"found a {type(message).__name__}, which no chat template has a role for")


def _thoughts_of(message: BaseMessage) -> dict[str, str]:
    """Thoughts of an earlier answer; the chat template chooses which are shown again."""
    if not isinstance(message, AIMessage):
        return {}
    blocks = (block for block in message.content_blocks if block["type"] == "reasoning")
    thoughts = "".join(str(block.get("reasoning", "")) for block in blocks)
    return {"reasoning_content": thoughts} if thoughts else {}


def _tool_fields(message: BaseMessage, names: Mapping[str, str]) -> dict[str, Any]:
    if isinstance(message, ToolMessage):
        call_id = message.tool_call_id
        return {"tool_call_id": call_id, "name": message.name or names.get(call_id, "")}
    if not isinstance(message, AIMessage) or not message.tool_calls:
        return {}
    calls = []
    for call in message.tool_calls:
        function = {"name": call["name"], "arguments": call["args"]}
        calls.append({"type": "function", "id": call["id"], "function": function})
    return {"tool_calls": calls}


def _text_of(message: BaseMessage) -> str:
    if isinstance(message.content, str):
        text = message.content
        if isinstance(message, ToolMessage) and not own_markers(text):
            text = _marked(text, message.artifact)
    else:
        text = "".join(_text_of_part(part, message) for part in message.content)
    invalid = message.invalid_tool_calls if isinstance(message, AIMessage) else []
    # The model sees what it wrote, so that it can do better.
    return "\n".join(part for part in (text, *(str(one["args"]) for one in invalid)) if part)


def _marked(content: str, artifact: Any) -> str:
    """What a retriever's tool found, between markers. The tool hands the documents on beside their
    text (``response_format="content_and_artifact"``), so the message itself needs no marker."""
    documents = artifact if isinstance(artifact, (list, tuple)) else ()
    marked, position = "", 0
    for document in documents:
        text = document.page_content.strip() if isinstance(document, Document) else ""
        # Only whole lines match, because a short text may stand within another one.
        whole = re.compile(rf"(?:\A|\n)[^\S\n]*({re.escape(text)})[^\S\n]*(?=\n|\Z)")
        if text and (found := whole.search(content, position)):
            marked += content[position : found.start(1)] + wrap(text)
            position = found.end(1)
    return marked + content[position:]


def _text_of_part(part: str | dict[str, Any], message: BaseMessage) -> str:
    """A part's text; a part with ``kv_handle`` is a passage, whatever the handle says."""
    if isinstance(part, str):
        return part
    if part.get("type") == "text" and isinstance(text := part.get("text"), str):
        is_passage = HANDLE_KEY in part or HANDLE_KEY in (part.get("extras") or {})
        return wrap(text) if is_passage else text
    if isinstance(message, AIMessage) and part.get("type") in _UNSEEN_PARTS:
        return ""
    raise ValueError(
        f"this model reads text only, found a part {json.dumps(part, default=str)[:80]} in a "
        f"{message.type} message; leave such content out"
    )


def message_figures(answer: Generation, model_name: str | None) -> dict[str, Any]:
    """Fields of the message with the last token: token counts, and what ``metadata_of`` tells.

    ``cache_read`` came from the store; ``cache_creation`` was computed now.
    """
    stats = answer.stats
    computed = stats.computed_tokens if stats.mode == "block" else 0
    details = InputTokenDetails(cache_read=stats.reused_tokens, cache_creation=computed)
    usage = UsageMetadata(
        input_tokens=stats.prompt_tokens,
        output_tokens=stats.generated_tokens,
        total_tokens=stats.prompt_tokens + stats.generated_tokens,
        input_token_details=details,
    )
    return {"usage_metadata": usage, "response_metadata": metadata_of(answer, model_name)}


def metadata_of(generation: Generation, model_name: str | None) -> dict[str, Any]:
    """``response_metadata``: who answered, why the answer ends, and what was reused."""
    return {
        "model_name": model_name or "unknown",
        "model_provider": PROVIDER,
        "finish_reason": generation.finish_reason,
        "block_attention": asdict(generation.stats),
    }
