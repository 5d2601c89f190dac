"""Calls of tools: what a model asks a program to do, and what it wrote that is no such call."""

from __future__ import annotations

import json
import math
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

_ID_CHARACTERS = string.ascii_letters + string.digits
ID_LENGTH = 9
"""Characters of a call's id: what Mistral's chat templates insist on, and others take as well."""

_HALF = re.compile("[\ud800-\udfff]")


def new_call_id() -> str:
    """An id for a call, letters and digits."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(ID_LENGTH))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: its name, and its arguments by name."""

    name: str
    arguments: dict[str, Any]
    id: str = field(default_factory=new_call_id)


@dataclass(frozen=True, slots=True)
class InvalidToolCall:
    """What a model wrote as a call and is none.

    Args:
        text: what it wrote, control tokens left out.
        error: what is wrong with it.
        name: the tool's name where it could be read.
    """

    text: str
    error: str
    name: str | None = None
    id: str = field(default_factory=new_call_id)


def read_call(
    value: Any, text: str, argument_keys: Sequence[str] = ("arguments",)
) -> ToolCall | InvalidToolCall:
    """A JSON value as a call. Nothing is guessed: all that stands in it must belong to a call.

    Args:
        value: an object with ``name``, one of ``argument_keys``, and maybe ``id`` and ``type``.
        text: what the model wrote.
    """
    if not isinstance(value, dict):
        return InvalidToolCall(text, f"expected a JSON object, found {_kind(value)}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return InvalidToolCall(text, f"expected a tool's 'name', found {_kind(name)}")
    keys = [key for key in argument_keys if key in value]
    if len(keys) != 1:
        expected = " or ".join(map(repr, argument_keys))
        return InvalidToolCall(text, f"expected {expected} once, found {sorted(value)}", name)
    if others := sorted(value.keys() - {"name", "id", "type", *keys}):
        return InvalidToolCall(text, f"found {', '.join(map(repr, others))} beside a call", name)
    if not isinstance(arguments := value[keys[0]], dict):
        error = f"expected {keys[0]!r} to be a JSON object, found {_kind(arguments)}"
        return InvalidToolCall(text, error, name)
    given = value.get("id")
    return ToolCall(name, arguments, given if isinstance(given, str) and given else new_call_id())


def strict_json(text: str) -> Any:
    """The JSON value of a text, and of a whole one only.

    Raises:
        ValueError: it is none; or holds NaN, an infinity, half of a surrogate pair or a key twice,
            which JSON parsers read in different ways, and which others cannot write again.
    """
    value = json.loads(
        text, object_pairs_hook=_object, parse_constant=_refuse_constant, parse_float=_finite
    )
    if half := _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError(f"found {half[0]!a}, half of a surrogate pair")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"found the key {twice!r} twice")
    return made


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"found {digits[:40]}, which is too large for a number")
    return number


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"found {word}, which is no JSON")


def _kind(value: Any) -> str:
    if value is None:
        return "none"
    kinds: Mapping[type, str] = {list: "a list", str: "a string", dict: "an object"}
    return kinds.get(type(value), repr(value)[:40])
