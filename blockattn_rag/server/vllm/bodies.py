"""Parses OpenAI request bodies: chats and completions, with their passages.

Clients send passages as ``documents``, as content parts of messages, or between markers.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from blockattn_rag.errors import ProtocolError
from blockattn_rag.output.tool_formats import ToolCall
from blockattn_rag.prompts.blocks import PASSAGES, Span
from blockattn_rag.prompts.chat_template import Spans, origin_of
from blockattn_rag.prompts.formats import CHAT, Passage
from blockattn_rag.prompts.markers import content_spans
from blockattn_rag.server.protocol import FIELD, MOST_BLOCKS
from blockattn_rag.server.validation import STRICT, as_object, parse, shown

_MOST_NESTED = 100  # Rendering deeper bodies could exceed Python's recursion limit.
_MOST_BITS = 63  # Larger integers make vLLM's engine fail.
_MOST_MESSAGES = 4096  # Messages and content parts, to limit the time to parse and render them.

_TEXT_PARTS = ("text", "input_text", "output_text")
_KEPT_FIELDS = ("name", "tool_call_id", "reasoning_content")


@dataclass(config=STRICT, frozen=True, slots=True)
class Document:
    """Passage in the ``documents`` field of a body."""

    text: str
    title: str = ""

    @field_validator("text")
    @classmethod
    def _has_text(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("The text is empty; remove empty documents")
        return text


@dataclass(config=STRICT, frozen=True, slots=True)
class ChatOptions:
    """Options in the field ``blockattn`` of a body.

    Args:
        mode: ``"full"`` prefills the same prompt without blocks, for comparison.
        parts: ``"passages"``: all content parts of a message but the last are passages, except in
            assistant messages. ``"text"``: content parts are joined by newlines.
    """

    mode: Literal["block", "full"] = "block"
    parts: Literal["text", "passages"] = "text"


_Documents = Annotated[tuple[Document, ...], Field(max_length=MOST_BLOCKS, fail_fast=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """Parsed body of a request.

    Args:
        spans: Text of the prompt, including the documents, without markers. No control tokens are
            parsed in it.
        fields: Remaining fields for vLLM, including the original prompt or messages.
    """

    spans: Spans
    options: ChatOptions
    fields: Mapping[str, Any]

    @property
    def passages(self) -> list[str]:
        """Texts of the passages. Omits passages that do not match their markers."""
        return [span.text for span in self.spans if span.origin == "passage" and span.text.strip()]

    @property
    def has_passages(self) -> bool:
        """Whether the body contains any passages, intact or altered."""
        return any(span.origin in PASSAGES and span.text.strip() for span in self.spans)


@dataclasses.dataclass(frozen=True, slots=True)
class ChatBody(_Body):
    """Parsed body of a chat.

    Args:
        messages: Messages for the chat template, including the documents. Contents are spans.
        not_text: Description of the first content part that is not text. None if all parts are
            text.
    """

    messages: Sequence[Mapping[str, Any]]
    not_text: str | None

    @classmethod
    def from_dict(cls, value: object) -> ChatBody:
        fields, documents, options = _read_fields(value)
        sent = fields.get("messages")
        if not isinstance(sent, list) or not sent:
            raise ProtocolError(f"messages should be a non-empty list, found {shown(sent)}")
        _check_number(sent)
        reader = _MessageReader(options.parts == "passages")
        messages = [reader.read(message, f"messages[{n}]") for n, message in enumerate(sent)]
        messages = with_documents(messages, documents)
        spans = (*chain.from_iterable(message["content"] for message in messages),)
        return cls(spans, options, fields, messages, reader.not_text)


class CompletionBody(_Body):
    @classmethod
    def from_dict(cls, value: object) -> CompletionBody:
        fields, documents, options = _read_fields(value)
        prompt = _string(fields.get("prompt"), "prompt")
        spans = (Span(CHAT.canonical_text(passage), "passage") for passage in documents)
        return cls((*spans, *content_spans(prompt, "conversation")), options, fields)


def _read_fields(value: object) -> tuple[dict[str, Any], list[Passage], ChatOptions]:
    fields = as_object(value, "The body")
    _check_json(fields)
    if fields.pop("kv_transfer_params", None) is not None:
        raise ProtocolError("kv_transfer_params is not supported on this route; remove it")
    documents = parse(_Documents, _popped(fields, "documents", ()), "documents")
    options = parse(ChatOptions, _popped(fields, FIELD, {}), FIELD)
    return fields, [Passage(one.title, one.text) for one in documents], options


def _check_number(messages: Sequence[Any]) -> None:
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    number = len(messages) + sum(len(content) for content in contents if isinstance(content, list))
    if number > _MOST_MESSAGES:
        raise ProtocolError(
            f"The chat has {number:,} messages and content parts, expected at most "
            f"{_MOST_MESSAGES:,}; join parts, or omit old messages"
        )


class _MessageReader:
    """Converts OpenAI messages to chat-template messages."""

    def __init__(self, takes_parts: bool) -> None:
        self._takes_parts = takes_parts
        self._tools: dict[str, str] = {}  # Tool names by call id.
        self.not_text: str | None = None

    def read(self, value: object, place: str) -> dict[str, Any]:
        sent = as_object(value, place)
        role = _string(sent.get("role"), f"{place}.role")
        # Clients use either name for this field.
        sent["reasoning_content"] = sent.get("reasoning_content") or sent.get("reasoning")
        message: dict[str, Any] = {"role": role}
        for name in _KEPT_FIELDS:
            if (given := sent.get(name)) is not None:
                message[name] = _string(given, f"{place}.{name}")
        if calls := sent.get("tool_calls"):
            message["tool_calls"] = _calls(calls, f"{place}.tool_calls")
            self._tools |= {call["id"]: call["function"]["name"] for call in message["tool_calls"]}
        if "tool_call_id" in message:
            message.setdefault("name", self._tools.get(message["tool_call_id"], ""))
        return {**message, "content": self._content(sent.get("content"), role, f"{place}.content")}

    def _content(self, content: object, role: str, place: str) -> Spans:
        if content is None or isinstance(content, str):
            return tuple(content_spans(content or "", origin_of(role)))
        if not isinstance(content, list):
            raise ProtocolError(
                f"{place} should be a string or a list of parts, found {shown(content)}"
            )
        texts = [self._text(part, f"{place}[{number}]") for number, part in enumerate(content)]
        passages: list[str] = []
        if self._takes_parts and role != "assistant":
            passages, texts = texts[:-1], texts[-1:]
        marked = (content_spans(text, "passage") for text in passages)
        return (*chain(*marked), *content_spans("\n".join(texts), origin_of(role)))

    def _text(self, part: object, place: str) -> str:
        """Return a content part's text. If it is not text, set ``not_text`` and return ``""``."""
        if isinstance(part, str):
            return part
        fields = as_object(part, place)
        kind = _string(fields.get("type"), f"{place}.type")
        if kind in _TEXT_PARTS:
            return _string(fields.get("text"), f"{place}.text")
        self.not_text = self.not_text or f"{place} has the type {shown(kind)}"
        return ""


def _popped(fields: dict[str, Any], name: str, default: object) -> object:
    value = fields.pop(name, None)
    return default if value is None else value


def _string(value: object, place: str) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"{place} should be a string, found {shown(value)}")
    return value


def _calls(calls: object, place: str) -> list[dict[str, Any]]:
    """Parse the tool calls of an earlier answer. Chat templates expect arguments as objects."""
    if not isinstance(calls, list):
        raise ProtocolError(f"{place} should be a list, found {shown(calls)}")
    read = []
    for number, value in enumerate(calls):
        call = as_object(value, f"{place}[{number}]")
        function = as_object(call.get("function"), f"{place}[{number}].function")
        name = _string(function.get("name"), f"{place}[{number}].function.name")
        arguments = _arguments(function.get("arguments"), f"{place}[{number}].function.arguments")
        call_id = _string(call.get("id") or "", f"{place}[{number}].id")
        read.append(ToolCall(name, arguments, call_id).to_dict())
    return read


def _arguments(value: object, place: str) -> dict[str, Any]:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{place} should be a string with a JSON object: {error}") from None
        _check_json(value)
    return as_object(value or {}, place)


def _check_json(value: object, depth: int = 0) -> None:
    """Raise ProtocolError for values that the server cannot process, such as NaN."""
    if depth > _MOST_NESTED:
        raise ProtocolError(f"The body is nested more than {_MOST_NESTED} levels deep; flatten it")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ProtocolError(
                f"The body contains a lone surrogate, \\u{ord(value[error.start]):04x}, which is "
                "not a valid character; replace it, for example with '?'"
            ) from None
    elif type(value) is int and value.bit_length() > _MOST_BITS:
        raise ProtocolError(f"The body contains {shown(value)}, expected at most {_MOST_BITS} bits")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ProtocolError(f"The body contains {value}, which is not valid JSON; remove it")
    elif isinstance(value, dict):  # Checking for dict is faster than checking for Mapping.
        for name, item in value.items():
            _check_json(name, depth)
            _check_json(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_json(item, depth + 1)


def with_documents(
    messages: Sequence[dict[str, Any]], documents: Sequence[Passage]
) -> list[dict[str, Any]]:
    """Insert documents into the first user message, in the prompt format ``formats.CHAT``.

    If the chat has no system message, the format's system message is added. Later messages follow
    the documents, so they belong to the final block unless they contain passages.
    """
    made = [*messages]
    if not documents:
        return made
    place = next((place for place, message in enumerate(made) if message["role"] == "user"), None)
    if place is None:
        raise ProtocolError("documents require a message with the role 'user', found none; add one")
    made[place] = {**made[place], "content": CHAT.user_spans(made[place]["content"], documents)}
    if all(origin_of(message["role"]) != "system" for message in made):
        made.insert(0, {"role": "system", "content": (Span(CHAT.system, "system"),)})
    return made
