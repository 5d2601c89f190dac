"""Depth limit for grammars, which llguidance compiles recursively.

Each nested level and each reference takes up to 4.5 KiB of the compiling thread's stack, which is
usually 8 MiB. An overflow would crash the process.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from blockattn_rag.errors import GrammarError

MOST_LEVELS = 800
"""Maximum number of levels, including those of chained references."""

# Tokens in llguidance's dialect of Lark.
_TOKEN = re.compile(
    r"""(?://|\#)[^\n]* | "(?:\\.|[^"\\])*" | /(?:\\.|[^/\\])+/ | (?P<json>%json\s*)
    | (?P<rule>\w+)(?:\.-?\d+|\[[^\]]*\]|\{[^}]*\}|::\w+)*\s*: | (?P<name>\w+)
    | (?P<open>[\[({]) | (?P<close>[\])}])""",
    re.VERBOSE | re.DOTALL,
)


class _Part(NamedTuple):
    """Number of levels in part of a grammar, and the names of the parts that it refers to."""

    levels: int
    names: frozenset[str]


def check_schema(schema: Any) -> None:
    """Check the depth of a JSON schema."""
    known: dict[int, _Part] = {}
    whole = _part(schema, known)
    pointers = [name for name in whole.names if name == "#" or name.startswith("#/")]
    parts = {name: _part(_resolved(schema, name), known) for name in pointers}
    # References with other names, such as anchors, may lead to any part of the schema.
    others = len(whole.names) - len(parts)
    _check((1 + others) * whole.levels + _longest(parts))


def check_lark(grammar: str) -> None:
    """Check the depth of a grammar in llguidance's dialect of Lark, and of its JSON schemas."""
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
    _check(_longest({rule: _Part(levels[rule], frozenset(names[rule])) for rule in names}))


def _check(levels: int) -> None:
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
    """Upper bound for the levels in a chain of references, regardless of their order."""
    users: dict[str, list[str]] = defaultdict(list)
    waiting = {name: len(part.names & parts.keys()) for name, part in parts.items()}
    for name, part in parts.items():
        for reference in part.names & parts.keys():
            users[reference].append(name)
    ready = [name for name, count in waiting.items() if not count]
    levels: dict[str, int] = {}
    for name in ready:  # The list grows during the loop.
        references: Collection[str] = parts[name].names & parts.keys()
        below = max((levels[reference] for reference in references), default=0)
        levels[name] = parts[name].levels + below
        for user in users[name]:
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    # A chain enters each part of a cycle, and each part that leads to one, at most once.
    cyclic = sum(part.levels for name, part in parts.items() if name not in levels)
    return cyclic + max(levels.values(), default=0)
