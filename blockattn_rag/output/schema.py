"""Prepares JSON schemas for compilation by closing objects where this is safe.

JSON Schema allows objects to have properties that the schema does not name. Small models keep
adding such properties, so objects are closed, as in vLLM. Every answer that fits the closed schema
fits the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from blockattn_rag.errors import GrammarError

MOST_SCHEMAS = 16_000
"""Maximum number of schemas in a schema, including itself. llguidance fails at about 20,000."""

MOST_OPTIONAL = 2_000
"""Maximum number of optional properties of one object. Compile time is quadratic in it."""

# Formats that llguidance supports.
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
    """Copy a schema with closed objects and without unsupported formats.

    Objects stay open if they require a property that they do not name. If the schema combines
    schemas, all objects stay open, because a property may belong to another part.

    Raises:
        GrammarError: The schema is nested too deeply or has more than ``MOST_SCHEMAS`` schemas, or
            an object has more than ``MOST_OPTIONAL`` optional properties.
    """
    try:
        nodes = list(_nodes(schema))
        change = _without_unknown_format if any(map(_combines, nodes)) else _closed
        result: dict[str, Any] = _mapped(schema, change)
    except RecursionError:
        raise GrammarError(
            "A JSON schema is nested too deeply, expected fewer than 100 levels: flatten it, or "
            "make it recursive with $ref"
        ) from None
    if len(nodes) > MOST_SCHEMAS:
        raise GrammarError(
            f"A JSON schema contains {len(nodes):,} schemas, expected at most "
            f"{MOST_SCHEMAS:,}: use enum instead of anyOf of constants, or offer fewer options"
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
            f"An object has {optional:,} optional properties, expected at most {MOST_OPTIONAL:,}: "
            "make some required, or split the object"
        )


def _combines(node: dict[str, Any]) -> bool:
    """Whether several schemas apply to one object."""
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
    """All schemas in a schema, starting with itself."""
    if isinstance(node, list):
        for one in node:
            yield from _nodes(one)
    elif isinstance(node, dict):
        yield node
        for name in _MAPS:
            if isinstance(node.get(name), dict):
                yield from _nodes([*node[name].values()])
        yield from _nodes([node[name] for name in _SUBSCHEMAS if name in node])


def _mapped(node: Any, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Apply ``change`` to a schema and then to all schemas in it."""
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
