"""One call of a chat model: the prompt that it becomes, and its answer as LangChain's types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.langchain.fields import GenerationFields
from blockattn_rag.langchain.messages import message_figures
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.thoughts import Said, ThoughtReader


class ChatExchange:
    """A call of a chat model. Thoughts of the model stand beside its answer, in
    ``additional_kwargs["reasoning_content"]``.

    Args:
        chat: the model.
        make_prompt: makes the prompt of the call's messages.
    """

    def __init__(self, chat: GenerationFields, make_prompt: Callable[[], BlockPrompt]) -> None:
        self._chat = chat
        self._make_prompt = make_prompt

    def prompt(self) -> BlockPrompt:
        """The blocks of the prompt, which is about to be answered."""
        prompt = self._make_prompt()
        self._thoughts = ThoughtReader(self._chat.source.tokenizer.tokenizer, prompt)
        return self._chat.source.noted(prompt)

    def chunk(self, piece: GenerationChunk) -> ChatGenerationChunk:
        """A piece of a stream. The last one carries all figures, so that the pieces sum up."""
        if (answer := piece.generation) is None:
            return ChatGenerationChunk(
                message=AIMessageChunk(**_fields(self._thoughts.push(piece.text)))
            )
        message = AIMessageChunk(
            **_fields(self._thoughts.finish(piece.text)),
            chunk_position="last",
            **message_figures(answer, self._chat.model_name),
        )
        ending = {"finish_reason": answer.finish_reason}
        return ChatGenerationChunk(message=message, generation_info=ending)

    def result(self, answer: Generation) -> ChatResult:
        """A whole answer."""
        figures = message_figures(answer, self._chat.model_name)
        message = AIMessage(**_fields(self._thoughts.finish(answer.text)), **figures)
        ending = {"finish_reason": answer.finish_reason}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=ending)])


def _fields(said: Said) -> dict[str, Any]:
    """What the model said, as fields of a message."""
    thoughts = {"reasoning_content": said.thoughts} if said.thoughts else {}
    return {"content": said.answer, "additional_kwargs": thoughts}
