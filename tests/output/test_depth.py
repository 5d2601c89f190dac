"""Grammars too deep for llguidance are refused: its stack overflow would end the process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from blockattn_rag.errors import GrammarError
from blockattn_rag.output.compiler import GrammarCompiler
from blockattn_rag.output.depth import MOST_LEVELS, check_lark, check_schema
from blockattn_rag.output.grammar import parse_grammar
from blockattn_rag.output.tool_formats import FORMATS, calls_grammar
from tests.models import tiny_tokenizer

TOKENIZER: Any = tiny_tokenizer()


def link(target: str, form: str = "property") -> dict[str, Any]:
    reference = {"$ref": target}
    links: dict[str, dict[str, Any]] = {
        "property": {"properties": {"k": reference}, "required": ["k"]},
        "alone": reference,
        "case": {"anyOf": [reference, {"type": "null"}]},
        "part": {"allOf": [reference, {"type": "object"}]},
        "list": {"items": {"items": {"items": {"items": {"items": reference}}}}},
    }
    return links[form]


def chain(length: int, form: str = "property") -> dict[str, Any]:
    """Return a schema with a chain of ``length`` references between definitions."""
    parts = {f"d{i}": link(f"#/$defs/d{i + 1}", form) for i in range(length)}
    return {"$defs": {**parts, f"d{length}": {"type": "object"}}, "$ref": "#/$defs/d0"}


def rules(length: int, name: str) -> str:
    lines = [f'{name}{i}: "x" {name}{i + 1}' for i in range(length)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{length}: "a"'])


def nested(levels: int) -> dict[str, Any]:
    return {"items": nested(levels - 1)} if levels else {}


def by_pointers(length: int) -> dict[str, Any]:
    """Return a schema with a chain of ``length`` references between properties."""
    parts = {f"p{i}": link(f"#/properties/p{i + 1}") for i in range(length)}
    return {"properties": {**parts, f"p{length}": {}}, "required": ["p0"]}


HOSTILE: dict[str, dict[str, Any]] = {
    **{form: {"json": chain(5_000, form)} for form in ("property", "alone", "case", "part")},
    "list": {"json": chain(500, "list")},
    "pointers": {"json": by_pointers(5_000)},
    "anchors": {
        "json": {
            "$defs": {f"d{i}": {"$anchor": f"a{i}", **link(f"#a{i + 1}")} for i in range(5_000)},
            "$ref": "#a0",
        }
    },
    "nested": {"json": nested(400)},
    "tag": {
        "structural_tag": {
            "triggers": ["<f"],
            "structures": [{"begin": "<f>", "schema": chain(5_000), "end": "</f>"}],
        }
    },
    "schema in Lark": {"grammar": f"start: %json {json.dumps(chain(5_000))}"},
    "rules": {"grammar": rules(30_000, "r")},
    "terminals": {"grammar": rules(30_000, "T")},
    "hidden by comments": {"grammar": rules(30_000, "r").replace(' "x" ', ' /"/ "/" ')},
    "brackets": {"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "groups": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_deep_grammar_is_refused(kind: str) -> None:
    grammar = parse_grammar(None, HOSTILE[kind])
    assert grammar is not None
    with pytest.raises(GrammarError, match=r"levels|cannot be compiled"):
        GrammarCompiler(TOKENIZER, [TOKENIZER.eos_token_id], "tiny").matcher(grammar)


@pytest.mark.parametrize("form", ["property", "alone", "case", "part", "list"])
def test_the_deepest_allowed_schema_compiles(form: str) -> None:
    length = MOST_LEVELS // (7 if form == "list" else 4)
    grammar = parse_grammar(None, {"json": chain(length, form)})
    assert grammar is not None
    GrammarCompiler(TOKENIZER, [TOKENIZER.eos_token_id], "tiny").matcher(grammar)


def test_the_deepest_allowed_rules_compile() -> None:
    for name in "rT":
        grammar = parse_grammar(None, {"grammar": rules(MOST_LEVELS - 2, name)})
        assert grammar is not None
        GrammarCompiler(TOKENIZER, [TOKENIZER.eos_token_id], "tiny").matcher(grammar)


def test_wide_and_recursive_schemas_are_not_deep() -> None:
    check_schema(
        {
            "anyOf": [{"$ref": f"#/$defs/{i}"} for i in range(5_000)],
            "$defs": {f"{i}": link("#/$defs/leaf") for i in range(5_000)} | {"leaf": {}},
        }
    )
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"$ref": "#"}}}
    check_schema(tree)
    check_schema({"properties": {"$ref": {"type": "string"}}, "enum": [{"$ref": 3}]})


def test_each_part_of_a_cycle_counts_once() -> None:
    def ring(length: int) -> dict[str, Any]:
        parts = {f"d{i}": link(f"#/$defs/d{(i + 1) % length}") for i in range(length)}
        return {"$defs": parts, "$ref": "#/$defs/d0"}

    check_schema(ring(200))
    with pytest.raises(GrammarError, match="905 levels, including references"):
        check_schema(ring(300))


def test_many_tools_are_not_deep() -> None:
    parameters = {"type": "object", "properties": {name: {} for name in ("call", "start")}}
    tools = [
        {"type": "function", "function": {"name": f"call_{i}", "parameters": parameters}}
        for i in range(1_000)
    ]
    for form in FORMATS.values():
        check_lark(calls_grammar(form, tools, TOKENIZER, several=True, or_text=True))
