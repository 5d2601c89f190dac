"""JSON schemas as they are compiled: what they leave open is closed where that changes no meaning.

An object may have further properties than those that its schema names, unless it forbids them. A
model that may go on does go on, so objects are closed. Whatever fits the closed schema fits the
open one too. vLLM closes them as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from blockattn_rag.errors import GrammarError

MOST_SCHEMAS = 16_000
"""Schemas within a schema, itself included. llguidance refuses some 20,000 and gives no number."""

MOST_OPTIONAL = 2_000
"""Optional properties of one object. Compiling them takes time that grows with their square."""

# Formats that the grammar knows. Others say something to the reader and nothing of the text.
_FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri"),
    }
)
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SUBSCHEMAS = (
    *("additionalProperties", "unevaluatedProperties", "propertyNames", "contains", "not"),
    *("items", "prefixItems", "additionalItems", "unevaluatedItems", "if", "then", "else"),
    *("allOf", "anyOf", "oneOf"),
)
_COMBINING = ("allOf", "anyOf", "oneOf", "$ref")
_OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")


def prepared(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema that is compiled in place of ``schema``, which stays as it is.

    Objects are closed, unless schemas are combined: then a property that one part does not name may
    be one of the other part. One that must have a property which it does not name stays open, too.
    Formats that are not known are left out, as JSON Schema has it.

    Raises:
        GrammarError: the schema is nested too deeply, it has more than ``MOST_SCHEMAS`` schemas,
            or an object has more than ``MOST_OPTIONAL`` optional properties.
    """
    try:
        nodes = list(_nodes(schema))
        change = _without_unknown_format if any(map(_combines, nodes)) else _closed
        result: dict[str, Any] = _mapped(schema, change)
    except RecursionError:
        raise GrammarError(
            "a JSON schema is nested too deeply, expected fewer than 100 levels: flatten it, or "
            "let it refer to itself by $ref"
        ) from None
    if len(nodes) > MOST_SCHEMAS:
        raise GrammarError(
            f"a JSON schema has {len(nodes):,} schemas within it, expected at most "
            f"{MOST_SCHEMAS:,}: use enum in place of anyOf of constants, or offer less at once"
        )
    for node in nodes:
        _check_optional(node)
    return result


def _check_optional(node: dict[str, Any]) -> None:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict) or len(properties) <= MOST_OPTIONAL:
        return
    optional = len(properties.keys() - set(required if isinstance(required, list) else ()))
    if optional > MOST_OPTIONAL:
        raise GrammarError(
            f"an object has {optional:,} optional properties, expected at most {MOST_OPTIONAL:,}: "
            "put them into required, or spread them over several objects"
        )


def _combines(node: dict[str, Any]) -> bool:
    """Whether two schemas hold for the same object here."""
    parts = [name for name in _COMBINING if name in node]
    several = len(parts) > 1 or len(node.get("allOf", ())) > 1
    return several or bool(parts and "properties" in node)


def _without_unknown_format(node: dict[str, Any]) -> dict[str, Any]:
    given = node.get("format")
    if "format" in node and not (isinstance(given, str) and given in _FORMATS):
        return {name: value for name, value in node.items() if name != "format"}
    return node


def _closed(node: dict[str, Any]) -> dict[str, Any]:
    node = _without_unknown_format(node)
    if "properties" not in node or any(name in node for name in _OPEN):
        return node
    required = node.get("required")
    if isinstance(required, list) and any(name not in node["properties"] for name in required):
        return node
    return {**node, "additionalProperties": False}


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """All schemas within a schema, itself first."""
    found: list[dict[str, Any]] = []

    def note(one: dict[str, Any]) -> dict[str, Any]:
        found.append(one)
        return one

    _mapped(node, note)
    yield from found


def _mapped(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """A schema with ``change`` made to each schema within it."""
    if isinstance(node, list):
        return [_mapped(one, change) for one in node]
    if not isinstance(node, dict):  # true and false are schemas too
        return node
    result = dict(change(node))
    for name in _MAPS:
        if isinstance(result.get(name), dict):
            result[name] = {key: _mapped(one, change) for key, one in result[name].items()}
    for name in _SUBSCHEMAS:
        if name in result:
            result[name] = _mapped(result[name], change)
    return result
