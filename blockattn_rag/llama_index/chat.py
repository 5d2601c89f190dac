"""Chat messages: from LlamaIndex's to the form that chat templates take, and back."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)

# Names that some providers use for the roles of the common chat templates.
_TEMPLATE_ROLES = {
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.DEVELOPER: "system",
    MessageRole.FUNCTION: "tool",
}


def as_template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Messages as ``{"role", "content"}``, block markers left in the content; thoughts of earlier
    answers are ``"reasoning_content"``, and the chat template chooses which are shown again.

    Raises:
        ValueError: a message holds an image or anything else that is not text.
    """
    return [
        {
            "role": _TEMPLATE_ROLES.get(m.role, m.role.value),
            "content": _text_of(m),
            **_thoughts_of(m),
        }
        for m in messages
    ]


def _text_of(message: ChatMessage) -> str:
    texts = []
    for block in message.blocks:
        if isinstance(block, ThinkingBlock):
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


def chat_response(completion: CompletionResponse) -> ChatResponse:
    """A completion, whole or a step of a stream, as the assistant's message."""
    thoughts = completion.additional_kwargs.get("thinking")
    blocks = [
        *([ThinkingBlock(content=thoughts)] if thoughts else []),
        TextBlock(text=completion.text),
    ]
    return ChatResponse(
        message=ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks),
        delta=completion.delta,
        raw=completion.raw,
        additional_kwargs=completion.additional_kwargs,
    )
