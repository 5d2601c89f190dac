"""One call of a chat model: the prompt that it becomes, and its answer as LangChain's types."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from blockattn_rag.engine.results import Generation, GenerationChunk, marks_at_end
from blockattn_rag.langchain.fields import GenerationFields
from blockattn_rag.langchain.messages import message_figures
from blockattn_rag.output import InvalidToolCall, ReadAnswer, ToolCall
from blockattn_rag.output.thinking import ThoughtReader
from blockattn_rag.output.tool_parser import Piece
from blockattn_rag.output.tool_use import AnswerReader
from blockattn_rag.prompts.blocks import BlockPrompt

# In LangChain's standard content, version 1, texts of a stream have numbers too, from 0 on, and
# parts of one number become one part.
_BEHIND_TEXTS = 1 << 20


class ChatExchange:
    """A call of a chat model. Thoughts of the model stand beside its answer, in
    ``additional_kwargs["reasoning_content"]``.

    Args:
        chat: the model.
        make_prompt: makes the prompt of the call's messages.
        calls: reads calls of tools; None: the answer is text.
        answers_at_once: as for ``ThoughtReader``.
    """

    def __init__(
        self,
        chat: GenerationFields,
        make_prompt: Callable[[], BlockPrompt],
        calls: AnswerReader | None = None,
        *,
        answers_at_once: bool = False,
    ) -> None:
        self._chat = chat
        self._make_prompt = make_prompt
        self._calls = calls
        self._answers_at_once = answers_at_once
        self._num_calls = 0

    def prompt(self) -> BlockPrompt:
        """The blocks of the prompt, which is about to be answered."""
        prompt = self._make_prompt()
        tokenizer, at_once = self._chat.source.tokenizer.tokenizer, self._answers_at_once
        self._thoughts = ThoughtReader(tokenizer, prompt, answers_at_once=at_once)
        return self._chat.source.noted(prompt)

    def chunk(self, piece: GenerationChunk) -> ChatGenerationChunk:
        """A piece of a stream. The last one carries all figures, so that the pieces sum up."""
        pieces, fields = self._said(piece, last=piece.generation is not None)
        fields["tool_call_chunks"] = self._call_chunks(pieces)
        if (answer := piece.generation) is None:
            return ChatGenerationChunk(message=AIMessageChunk(**fields))
        figures = message_figures(answer, self._chat.model_name)
        message = AIMessageChunk(**fields, chunk_position="last", **figures)
        ending = {"finish_reason": answer.finish_reason}
        return ChatGenerationChunk(message=message, generation_info=ending)

    def result(self, answer: Generation) -> ChatResult:
        """A whole answer."""
        pieces, fields = self._said(answer, last=True)
        _, calls, invalid = ReadAnswer.of(pieces)
        message = AIMessage(
            **fields,
            tool_calls=[tool_call(name=c.name, args=c.arguments, id=c.id) for c in calls],
            invalid_tool_calls=[
                invalid_tool_call(name=one.name, args=one.text, id=one.id, error=one.error)
                for one in invalid
            ],
            **message_figures(answer, self._chat.model_name),
        )
        ending = {"finish_reason": answer.finish_reason}
        return ChatResult(generations=[ChatGeneration(message=message, generation_info=ending)])

    def _said(
        self, piece: Generation | GenerationChunk, *, last: bool
    ) -> tuple[Sequence[Piece], dict[str, Any]]:
        """What the model said: text and calls of tools; and what of it are fields of a message."""
        said = self._thoughts.finish(piece.text) if last else self._thoughts.push(piece.text)
        pieces: Sequence[Piece] = [said.answer]
        if self._calls is not None:
            marks = marks_at_end(piece, said.answer)
            pieces = self._calls.read(said.answer, marks, last=last)
        thoughts = {"reasoning_content": said.thoughts} if said.thoughts else {}
        return pieces, {"content": ReadAnswer.of(pieces).text, "additional_kwargs": thoughts}

    def _call_chunks(self, pieces: Sequence[Piece]) -> list[Any]:
        """Calls, each in one chunk: LangChain completes the arguments of a call that was cut."""
        chunks = []
        for one in pieces:
            if isinstance(one, ToolCall):
                arguments = json.dumps(one.arguments, ensure_ascii=False)
            elif isinstance(one, InvalidToolCall):
                # LangChain takes a chunk for a call if JSON can be made of it: this never can.
                arguments = f"{one.error}: {one.text}"
            else:
                continue
            index = self._num_calls
            if getattr(self._chat, "output_version", None) == "v1":
                index += _BEHIND_TEXTS
            chunks.append(tool_call_chunk(name=one.name, args=arguments, id=one.id, index=index))
            self._num_calls += 1
        return chunks
