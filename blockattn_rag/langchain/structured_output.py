"""Chat models whose answers are objects of a schema, held to it token by token."""

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
    knows_tools: bool,
    include_raw: bool,
    strict: bool | None,
) -> Runnable[LanguageModelInput, Any]:
    """What ``ChatBlockAttention.with_structured_output`` returns.

    Args:
        knows_tools: whether the model's chat template does.

    Raises:
        ValueError: another method, or no schema where one is needed.
    """
    if method not in get_args(Method):
        known = ", ".join(get_args(Method))
        raise ValueError(f"method must be one of {known}; found {method!r}")
    if schema is None and method != "json_mode":
        raise ValueError(f"method={method!r} needs a schema; json_mode alone does without")
    asked: dict[str, Any] = {"type": "json_object"}
    if schema is not None:
        named = named_schema(schema)
        asked = {"type": "json_schema", "json_schema": named}
        if strict is not None:
            named["strict"] = strict
    told = {"kwargs": {"method": method, "strict": strict}, "schema": schema}
    answering: Runnable[LanguageModelInput, AIMessage]
    if method == "function_calling" and knows_tools:
        tool = _as_tool(named_schema(schema))
        answering = chat.bind_tools(
            [tool],
            tool_choice=tool["function"]["name"],
            parallel_tool_calls=False,
            strict=strict,
            ls_structured_output_format=told,
        )
    else:
        answering = chat.bind(response_format=asked, ls_structured_output_format=told)
    parser: BaseCumulativeTransformOutputParser[Any]
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        parser = _WholePydantic(pydantic_object=schema)
    else:
        parser = _WholeJson()
    return _beside_raw(answering, parser) if include_raw else answering | parser


def named_schema(schema: Any) -> dict[str, Any]:
    """A schema with its name, of all that LangChain takes for one.

    Args:
        schema: a pydantic class, a TypedDict, a JSON schema, or OpenAI's form of a function, a tool
            or a response format.

    Raises:
        ValueError: it is none of these.
    """
    if isinstance(schema, type) and is_basemodel_subclass(schema):
        # As pydantic has it, because LangChain's own form resolves references, some without end.
        pydantic: Any = schema  # of version 2, or of version 1
        of = getattr(pydantic, "model_json_schema", None) or pydantic.schema
        return {"name": schema.__name__, "schema": of()}
    if isinstance(schema, Mapping):
        given = schema.get("json_schema", schema)
        if isinstance(given.get("schema"), Mapping):
            return {"name": given.get("name", "answer"), "schema": dict(given["schema"])}
        if "name" not in given and given.get("type") != "function":
            return {"name": given.get("title", "answer"), "schema": dict(given)}
    if isinstance(schema, Mapping):
        schema = schema.get("function", schema)  # of a tool
    try:
        function = convert_to_openai_function(schema)
    except (TypeError, ValueError) as error:
        raise ValueError(
            "a schema is a pydantic class, a TypedDict, a JSON schema, or a function's definition; "
            f"found {schema!r:.60}. Put a bare type into a class, as a field ({error})"
        ) from error
    return {"name": function["name"], "schema": function["parameters"]}


def _as_tool(named: dict[str, Any]) -> dict[str, Any]:
    """The definition of a tool whose arguments are the object."""
    schema = named["schema"]
    function = {"name": named["name"], "description": schema.get("description", "")}
    return {"type": "function", "function": {**function, "parameters": schema}}


def _beside_raw(answering: Runnable[Any, BaseMessage], parser: Any) -> Runnable[Any, Any]:
    """The message, the object, and the error in place of the object, as LangChain has them."""
    parsed = RunnablePassthrough.assign(
        parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
    )
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    either = parsed.with_fallbacks([failed], exception_key="parsing_error")
    return RunnableMap(raw=answering) | either


def _object_of(result: list[Generation]) -> list[Generation]:
    """The text of an answer, or of the arguments of the call that it is.

    Raises:
        IncompleteAnswerError: it has ended before it was an object. Nothing is said of one to go
            on.
    """
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


class _WholeJson(JsonOutputParser):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return super().parse_result(_object_of(result), partial=partial)


class _WholePydantic(PydanticOutputParser[Any]):
    def parse_result(self, result: list[Generation], *, partial: bool = False) -> Any:
        return super().parse_result(_object_of(result), partial=partial)
