"""Valid and invalid tool calls, and strict JSON parsing."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

ID_LENGTH = 9
"""Length of call ids. Mistral's chat templates require it, others accept it."""

_HALF = re.compile("[\ud800-\udfff]")


def new_call_id() -> str:
    return secrets.token_hex(ID_LENGTH)[:ID_LENGTH]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call: tool name, and arguments by name."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=new_call_id)

    def to_dict(self) -> dict[str, Any]:
        """Convert the call to the form used in chat messages."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"type": "function", "id": self.id, "function": function}


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """An invalid tool call in a model's answer.

    Args:
        error: Description of what was expected and found.
    """

    text: str
    error: str
    name: str | None = None
    id: str = field(default_factory=new_call_id)


def read_call(
    value: Any, text: str, argument_keys: Sequence[str] = ("arguments",)
) -> ToolCall | InvalidToolCall:
    """Parse a JSON value as a call, which is invalid if it has unknown fields."""
    if not isinstance(value, dict):
        return InvalidToolCall(text, f"Expected a JSON object, found {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return InvalidToolCall(text, f"Expected a tool's 'name', found {_kind(name)}")
    keys = [key for key in argument_keys if key in value]
    if len(keys) != 1:
        expected = " or ".join(map(repr, argument_keys))
        return InvalidToolCall(text, f"Expected {expected} once, found {sorted(value)}", name)
    if others := sorted(value.keys() - {"name", "id", "type", *keys}):
        return InvalidToolCall(text, f"Found unknown fields {', '.join(map(repr, others))}", name)
    if not isinstance(arguments := value[keys[0]], dict):
        error = f"Expected {keys[0]!r} to be a JSON object, found {_kind(arguments)}"
        return InvalidToolCall(text, error, name)
    call_id = value.get("id")
    if not isinstance(call_id, str) or not call_id:
        call_id = new_call_id()
    return ToolCall(name, arguments, call_id)


def decode_json(text: str, start: int = 0) -> tuple[Any, int]:
    """Parse the JSON value that begins at ``start``. Returns the value and its end index."""
    value, end = _DECODER.raw_decode(text, start)
    if half := _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError(f"Found {half[0]!a}, which is a lone surrogate")
    return value, end


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"Found the key {key!r} twice")
        value[key] = item
    return value


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"Found the number {digits[:40]}, expected a finite 64-bit float")
    return number


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"Found {word}, which is not valid JSON")


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    kinds: Mapping[type, str] = {list: "a list", str: "a string", dict: "an object"}
    return kinds.get(type(value), repr(value)[:40])


_DECODER = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite
)
