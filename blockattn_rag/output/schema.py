"""Prepares JSON schemas for compilation: closes objects where this is safe.

JSON Schema allows objects to have properties that the schema does not mention. Small models keep
adding those, so objects are closed, as in vLLM. Every answer that matches the closed schema also
matches the original.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from blockattn_rag.errors import GrammarError

MOST_OPTIONAL = 2_000
"""Maximum number of optional properties in an object. Compile time is quadratic in it."""

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
    """Copy a schema with closed objects, and without unsupported formats.

    Objects stay open if they require a property that they do not define. If the schema combines
    schemas, all objects stay open, because a property may belong to another part.
    """
    try:
        schema = copy.deepcopy(schema)
        nodes = [*_nodes(schema)]
    except RecursionError:
        raise GrammarError(
            "A JSON schema is nested too deeply, expected fewer than 100 levels: flatten it, or "
            "make it recursive with $ref"
        ) from None
    is_combined = any(map(_combines, nodes))
    for node in nodes:
        _check_optional(node)
        value = node.get("format")
        if not (isinstance(value, str) and value in _FORMATS):
            node.pop("format", None)
        if not is_combined and _can_close(node):
            node["additionalProperties"] = False
    return schema


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


def _can_close(node: dict[str, Any]) -> bool:
    properties, required = node.get("properties"), node.get("required")
    if properties is None or any(name in node for name in _OPEN):
        return False
    return not isinstance(required, list) or all(name in properties for name in required)


def _nodes(node: Any) -> Iterator[dict[str, Any]]:
    """Iterate over a schema and all schemas nested in it."""
    if isinstance(node, list):
        for item in node:
            yield from _nodes(item)
    elif isinstance(node, dict):  # True and false are also schemas, but have nothing to close.
        yield node
        for name in _MAPS:
            if isinstance(node.get(name), dict):
                yield from _nodes([*node[name].values()])
        yield from _nodes([node[name] for name in _SUBSCHEMAS if name in node])
