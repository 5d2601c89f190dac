"""Structured predictions, constrained by a grammar."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Generator
from typing import Any, TypeVar

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole
from llama_index.core.bridge.pydantic import BaseModel, TypeAdapter, ValidationError
from llama_index.core.instrumentation.events.llm import (
    LLMStructuredPredictEndEvent,
    LLMStructuredPredictStartEvent,
)
from llama_index.core.llms.llm import LLM
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index_instrumentation import get_dispatcher

from blockattn_rag.output.answers import complete_json

dispatcher = get_dispatcher(__name__)

Model = TypeVar("Model", bound=BaseModel)

_JSON: TypeAdapter[Any] = TypeAdapter(Any)


class StructuredPrediction(LLM):
    """LLM methods that return objects, used by ``output_cls`` and ``as_structured_llm``.

    The schema is appended to the prompt, and a grammar enforces it. Calls raise
    ``IncompleteAnswerError`` if the answer is cut off, and ``GrammarError`` for invalid schemas.
    """

    @dispatcher.span
    def structured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        _dispatch_start(output_cls, prompt, prompt_args)
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        return _dispatch_end(_complete(output_cls, self.chat(messages, **options)))

    @dispatcher.span
    async def astructured_predict(
        self,
        output_cls: type[Model],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Model:
        _dispatch_start(output_cls, prompt, prompt_args)
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        return _dispatch_end(_complete(output_cls, await self.achat(messages, **options)))

    def _structured_stream_call(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> Generator[Any, None, None]:
        partial_objects = _PartialObjects(output_cls)
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        for step in self.stream_chat(messages, **options):
            yield from partial_objects.take(step)

    async def _structured_astream_call(
        self,
        output_cls: type[Any],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None = None,
        **prompt_args: Any,
    ) -> AsyncGenerator[Any, None]:
        partial_objects = _PartialObjects(output_cls)
        messages, options = self._request(output_cls, prompt, llm_kwargs, prompt_args)
        steps = await self.astream_chat(messages, **options)
        return (partial async for step in steps for partial in partial_objects.take(step))

    def _request(
        self,
        output_cls: type[BaseModel],
        prompt: BasePromptTemplate,
        llm_kwargs: dict[str, Any] | None,
        prompt_args: dict[str, Any],
    ) -> tuple[list[ChatMessage], dict[str, Any]]:
        """Return messages with the schema appended, and call options that enforce the schema."""
        expected = PydanticOutputParser(output_cls).get_format_string(escape_json=False).strip()
        messages = [*self._get_messages(prompt, **prompt_args)]
        if messages and messages[-1].role == MessageRole.USER:
            last = messages.pop().model_copy(deep=True)
            last.content = f"{last.content or ''}\n\n{expected}"
        else:
            last = ChatMessage(role=MessageRole.USER, content=expected)
        schema = {"name": output_cls.__name__, "schema": output_cls.model_json_schema()}
        asked = {"type": "json_schema", "json_schema": schema}
        return [*messages, last], {**(llm_kwargs or {}), "response_format": asked}


class _PartialObjects:
    """Parser of a stream's steps as partial objects, and of the last step as a complete object."""

    def __init__(self, output_cls: type[BaseModel]) -> None:
        self._output_cls = output_cls
        self._partial_cls = create_flexible_model(output_cls)
        self._last: Any = None

    def take(self, step: ChatResponse) -> Generator[Any, None, None]:
        if step.raw is not None:  # Only the last step has usage data.
            yield _complete(self._output_cls, step)
            return
        try:
            text = step.message.content or ""
            value = _JSON.validate_json(text, experimental_allow_partial="trailing-strings")
        except ValueError:  # The object has not started yet.
            return
        if isinstance(value, dict) and value != self._last:
            self._last = value
            try:
                yield self._output_cls.model_validate(value)
            except ValidationError:
                yield self._partial_cls.model_validate(value)


def _complete(output_cls: type[Model], answer: ChatResponse) -> Model:
    raw: Any = answer.raw
    value = complete_json(answer.message.content or "", raw["finish_reason"])
    return output_cls.model_validate_json(json.dumps(value))


def _dispatch_start(
    output_cls: type[BaseModel], prompt: BasePromptTemplate, prompt_args: dict[str, Any]
) -> None:
    dispatcher.event(
        LLMStructuredPredictStartEvent(
            output_cls=output_cls, template=prompt, template_args=prompt_args
        )
    )


def _dispatch_end(output: Model) -> Model:
    dispatcher.event(LLMStructuredPredictEndEvent(output=output))
    return output
