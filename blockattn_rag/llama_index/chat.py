"""Chat messages: from LlamaIndex's to the form that chat templates take, and back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
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
from llama_index.core.llms.llm import ToolSelection

from blockattn_rag.engine.results import Marks
from blockattn_rag.errors import ToolCallError
from blockattn_rag.output import ReadAnswer
from blockattn_rag.output.tool_parser import Piece
from blockattn_rag.output.tool_use import AnswerReader

INVALID_CALLS = "invalid_tool_calls"
"""Key of a message's ``additional_kwargs`` with the malformed calls of an answer: for each its
``text``, what is wrong (``error``), and the tool's ``name`` if it could be read."""

# Names that some providers use for the roles of the common chat templates.
_TEMPLATE_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
}


def as_template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as ``{"role", "content"}``, block markers left in the content, with calls of tools
    and the ids of results. Thoughts of earlier answers are ``"reasoning_content"``, and the chat
    template chooses which are shown again.

    Raises:
        ValueError: a message holds an image or anything else that is not text, or arguments of a
            call that are no JSON.
    """
    turns: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools that were called, by the calls' ids
    for message in messages:
        role = _TEMPLATE_ROLES.get(message.role, message.role.value)
        turn: dict[str, Any] = {"role": role, "content": _text_of(message), **_thoughts_of(message)}
        if calls := [block for block in message.blocks if isinstance(block, ToolCallBlock)]:
            turn["tool_calls"] = [_template_call(call) for call in calls]
            names |= {call.tool_call_id or "": call.tool_name for call in calls}
        if role == "tool":
            call_id = str(message.additional_kwargs.get("tool_call_id", ""))
            turn |= {"tool_call_id": call_id, "name": names.get(call_id, "")}
        turns.append(turn)
    return turns


def _template_call(call: ToolCallBlock) -> dict[str, Any]:
    arguments = call.tool_kwargs
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise ValueError(
                f"found an earlier call of {call.tool_name} whose arguments are no JSON ({error}): "
                f"{arguments[:80]!r}; leave it out of the history"
            ) from error
    function = {"name": call.tool_name, "arguments": arguments}
    return {"type": "function", "id": call.tool_call_id or "", "function": function}


def _text_of(message: ChatMessage) -> str:
    texts = []
    for block in message.blocks:
        if isinstance(block, (ToolCallBlock, ThinkingBlock)):
            continue
        if not isinstance(block, TextBlock):
            raise ValueError(
                f"BlockAttentionLLM reads text only, found a {type(block).__name__} in a "
                f"{message.role.value} message; leave such content out"
            )
        texts.append(block.text)
    return "\n".join(texts)


def _thoughts_of(message: ChatMessage) -> dict[str, str]:
    thoughts = (block.content for block in message.blocks if isinstance(block, ThinkingBlock))
    return {"reasoning_content": text} if (text := "".join(filter(None, thoughts))) else {}


class ChatReader:
    """Makes the assistant's message of an answer that comes whole or in steps.

    Args:
        reader: reads calls of tools; None: the answer is text.
    """

    def __init__(self, reader: AnswerReader | None) -> None:
        self._reader = reader
        self._pieces: list[Piece] = []

    def response(
        self, completion: CompletionResponse, marks: Marks, *, last: bool = True
    ) -> ChatResponse:
        """The message so far.

        Args:
            completion: a whole answer, or the next step of a stream.
            marks: where control tokens are in it.
            last: whether no more comes.
        """
        delta = completion.delta
        if self._reader is None:
            self._pieces = [completion.text]
        else:
            text = completion.text if delta is None else delta
            pieces = self._reader.read(text, marks, last=last)
            self._pieces += pieces
            delta = None if delta is None else ReadAnswer.of(pieces).text
        extra = completion.additional_kwargs
        return ChatResponse(
            message=self._message(extra.get("thinking")),
            delta=delta,
            raw=completion.raw,
            additional_kwargs=extra,
        )

    def _message(self, thoughts: str | None) -> ChatMessage:
        text, calls, invalid = ReadAnswer.of(self._pieces)
        # Whoever takes the message for an answer sees what the model wrote in the place of a call.
        shown = "\n".join(part for part in (text, *(one.text for one in invalid)) if part)
        blocks: list[ThinkingBlock | TextBlock | ToolCallBlock] = []
        if thoughts:
            blocks.append(ThinkingBlock(content=thoughts))
        if shown or not calls:
            blocks.append(TextBlock(text=shown))
        blocks += [
            ToolCallBlock(tool_call_id=one.id, tool_name=one.name, tool_kwargs=one.arguments)
            for one in calls
        ]
        extra = {INVALID_CALLS: [asdict(one) for one in invalid]} if invalid else {}
        return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=extra)


def tool_selections(response: ChatResponse, *, required: bool) -> list[ToolSelection]:
    """The calls of a response.

    Raises:
        ToolCallError: there is none, or a malformed one, and some are ``required``.
    """
    message = response.message
    invalid = message.additional_kwargs.get(INVALID_CALLS, [])
    calls = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    if required and invalid:
        found = "; ".join(f"{one['error']}: {one['text'][:200]!r}" for one in invalid)
        raise ToolCallError(f"the model wrote a malformed call of a tool. {found}")
    if required and not calls:
        raise ToolCallError(
            f"expected a call of a tool, the model answered {(message.content or '')[:200]!r}. "
            "With tool_required=True a grammar makes it call one"
        )
    return [
        ToolSelection(
            tool_id=call.tool_call_id or "",
            tool_name=call.tool_name,
            tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, dict) else {},
        )
        for call in calls
    ]
