"""Prepares JSON schemas for compilation, and limits the size and depth of grammars.

JSON Schema allows objects to have properties that the schema does not mention. Small models keep
adding such properties, so objects are closed to them where this is safe, as in vLLM. Every answer
that matches the closed schema also matches the original.

llguidance compiles grammars recursively. Each nested level and each reference takes up to 4.5 KiB
of the compiling thread's stack, which is usually 8 MiB. An overflow would crash the process.
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple
from urllib.parse import unquote

from blockattn_rag.errors import GrammarError

MOST_OPTIONAL = 2_000
"""Maximum number of optional properties in an object. Compile time is quadratic in this number."""

MOST_LEVELS = 800
"""Maximum depth of a grammar. Chained references add their levels."""

# Tokens in llguidance's dialect of Lark.
_TOKEN = re.compile(
    r"""(?://|\#)[^\n]* | "(?:\\.|[^"\\])*" | /(?:\\.|[^/\\])+/ | (?P<json>%json\s*)
    | (?P<rule>\w+)(?:\.-?\d+|\[[^\]]*\]|\{[^}]*\}|::\w+)*\s*: | (?P<name>\w+)
    | (?P<open>[\[({]) | (?P<close>[\])}])""",
    re.VERBOSE | re.DOTALL,
)
# Formats that llguidance supports.
_FORMATS = (
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"),
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
    """Copy a schema, close its objects, and remove unsupported formats.

    An object stays open if it defines no ``properties``, sets which others are allowed, or requires
    one that it does not define. If any part of the schema combines schemas, all objects stay open,
    because a property may belong to another part. Raises GrammarError if a limit is exceeded.
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
        if node.get("format") not in _FORMATS:
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


class _Part(NamedTuple):
    """Number of levels in part of a grammar, and the names of the parts that it refers to."""

    levels: int
    names: frozenset[str]


def check_schema(schema: Any) -> None:
    """Raise GrammarError if a JSON schema is too deep."""
    known: dict[int, _Part] = {}
    whole = _part(schema, known)
    pointers = [name for name in whole.names if name == "#" or name.startswith("#/")]
    parts = {name: _part(_resolved(schema, name), known) for name in pointers}
    # Other references, such as anchors, may lead to any part, so each may add all levels.
    others = len(whole.names) - len(parts)
    _check_levels((1 + others) * whole.levels + _longest(parts))


def check_lark(grammar: str) -> None:
    """Raise GrammarError if a Lark grammar for llguidance, or a schema in it, is too deep."""
    names: dict[str, set[str]] = defaultdict(set)
    levels: dict[str, int] = defaultdict(lambda: 1)
    rule, depth, at = "", 0, 0
    while token := _TOKEN.search(grammar, at):
        at = token.end()
        if token["json"]:
            try:
                schema, at = json.JSONDecoder().raw_decode(grammar, at)
            except ValueError:  # llguidance will report the error in the schema.
                continue
            check_schema(schema)
        elif token["rule"]:
            rule, depth = token["rule"], 0
            names[rule].update()
        elif token["name"]:
            names[rule].add(token["name"])
        elif token["open"] or token["close"]:
            depth += 1 if token["open"] else -1
            levels[rule] = max(levels[rule], 1 + depth)
    _check_levels(_longest({rule: _Part(levels[rule], frozenset(names[rule])) for rule in names}))


def _check_levels(levels: int) -> None:
    if levels > MOST_LEVELS:
        raise GrammarError(
            f"A grammar has up to {levels:,} levels, including references, expected at most "
            f"{MOST_LEVELS}: flatten it, or use fewer references"
        )


def _part(node: Any, known: dict[int, _Part]) -> _Part:
    if not isinstance(node, (dict, list)):
        return _Part(0, frozenset())
    if id(node) not in known:
        parts = [_part(item, known) for item in (node.values() if isinstance(node, dict) else node)]
        names = frozenset[str]().union(*(part.names for part in parts if part.names))
        if isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
            names |= {reference}
        known[id(node)] = _Part(1 + max((part.levels for part in parts), default=0), names)
    return known[id(node)]


def _resolved(schema: Any, pointer: str) -> Any:
    """Return the part of a schema at a JSON pointer, or None."""
    for key in unquote(pointer).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            schema = schema.get(key) if isinstance(schema, dict) else None
    return schema


def _longest(parts: Mapping[str, _Part]) -> int:
    """Return an upper bound for the levels in any chain of references."""
    references = {name: part.names & parts.keys() for name, part in parts.items()}
    order = TopologicalSorter(references)
    with suppress(CycleError):
        order.prepare()
    levels: dict[str, int] = {}
    while ready := order.get_ready():  # Nothing is ready once only cycles are left.
        for name in ready:
            below = max((levels[reference] for reference in references[name]), default=0)
            levels[name] = parts[name].levels + below
        order.done(*ready)
    # A chain enters each part of a cycle, and each part that leads to one, at most once.
    cyclic = sum(part.levels for name, part in parts.items() if name not in levels)
    return cyclic + max(levels.values(), default=0)
