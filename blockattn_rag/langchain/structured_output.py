"""Chat models whose answers match a schema, which a grammar enforces."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, Literal, get_args

from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import (
    BaseCumulativeTransformOutputParser,
    JsonOutputParser,
    PydanticOutputParser,
)
from langchain_core.outputs import ChatGeneration, Generation
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_function
from langchain_core.utils.pydantic import is_basemodel_subclass

from blockattn_rag.output.answers import complete_json, incomplete

Method = Literal["json_schema", "function_calling", "json_mode"]


def structured_chat(
    chat: BaseChatModel,
    schema: Any,
    method: Method,
    *,
    supports_tools: bool,
    include_raw: bool,
    strict: bool | None,
) -> Runnable[LanguageModelInput, Any]:
    """Create the runnable for ``ChatBlockAttention.with_structured_output``."""
    if method not in get_args(Method):
        known = ", ".join(get_args(Method))
        raise ValueError(f"Unknown method {method!r}: expected one of {known}")
    if schema is None and method != "json_mode":
        raise ValueError(
            f"The method {method!r} requires a schema; pass one, or use method='json_mode'"
        )
    format_info = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    named = None if schema is None else named_schema(schema)
    model: Runnable[LanguageModelInput, AIMessage]
    if named and method == "function_calling" and supports_tools:
        function = {
            "name": named["name"],
            "description": named["schema"].get("description", ""),
            "parameters": named["schema"],
        }
        model = chat.bind_tools(
            [{"type": "function", "function": function}],
            tool_choice=named["name"],
            parallel_tool_calls=False,
            strict=strict,
            ls_structured_output_format=format_info,
        )
    else:
        asked: dict[str, Any] = {"type": "json_object"}
        if named:
            form = named if strict is None else {**named, "strict": strict}
            asked = {"type": "json_schema", "json_schema": form}
        model = chat.bind(response_format=asked, ls_structured_output_format=format_info)
    parser: BaseCumulativeTransformOutputParser[Any] = _CompleteJson()
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = _CompletePydantic(pydantic_object=schema)
    return _with_raw(model, parser) if include_raw else model | parser


def named_schema(schema: Any) -> dict[str, Any]:
    """Convert any schema that LangChain accepts to a JSON schema with a name."""
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        # Use pydantic, because LangChain's conversion inlines references, even if recursive.
        pydantic: Any = schema  # Class of pydantic 1 or 2.
        of = getattr(pydantic, "model_json_schema", None) or pydantic.schema
        return {"name": schema.__name__, "schema": of()}
    if isinstance(schema, Mapping):
        definition = schema.get("json_schema", schema)
        if isinstance(definition.get("schema"), Mapping):
            return {"name": definition.get("name", "answer"), "schema": dict(definition["schema"])}
        if "name" not in definition and definition.get("type") != "function":
            return {"name": definition.get("title", "answer"), "schema": dict(definition)}
        schema = schema.get("function", schema)  # Unwrap a tool.
    try:
        function = convert_to_openai_function(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "A schema must be a pydantic class, a TypedDict, a JSON schema or a function "
            f"definition, found {schema!r:.60}. Wrap a plain type in a class with one field "
            f"({error})"
        ) from error
    return {"name": function["name"], "schema": function["parameters"]}


def _with_raw(model: Runnable[Any, BaseMessage], parser: Any) -> Runnable[Any, Any]:
    """Create a runnable that returns a dict of message, parsed object and parsing error."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    either = parsed.with_fallbacks([failed], exception_key="parsing_error")
    return RunnableMap(raw=model) | either


def _object_of(result: list[Generation]) -> list[Generation]:
    """Return an answer's JSON: its text, or the arguments of its tool call."""
    (generation,) = result
    if not isinstance(generation, ChatGeneration):
        return result
    message = generation.message
    reason = message.response_metadata.get("finish_reason")
    if isinstance(message, AIMessage) and message.tool_calls:
        return [Generation(text=json.dumps(message.tool_calls[0]["args"]))]
    if isinstance(message, AIMessage) and message.invalid_tool_calls and reason is not None:
        call = message.invalid_tool_calls[0]
        raise incomplete(call["args"] or "", reason, call["error"] or "")
    if reason is not None:
        complete_json(generation.text, reason)
    return result


class _CompleteJson(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return super().parse_result(_object_of(result), partial=partial)


class _CompletePydantic(PydanticOutputParser[Any]):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return super().parse_result(_object_of(result), partial=partial)
