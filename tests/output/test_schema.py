"""Preparation of schemas, and limits: a stack overflow in llguidance would end the process."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from blockattn_rag.errors import GrammarError
from blockattn_rag.output.schema import MOST_LEVELS, check_lark, check_schema, prepared
from blockattn_rag.output.tool_formats import FORMATS, calls_grammar
from tests.output.grammars import TOKENIZER, matcher, nested

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {**OBJECT, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (OBJECT, CLOSED),
        ({"items": OBJECT}, {"items": CLOSED}),
        ({"prefixItems": [OBJECT, True]}, {"prefixItems": [CLOSED, True]}),
        ({"$defs": {"T": OBJECT}}, {"$defs": {"T": CLOSED}}),
        ({"anyOf": [OBJECT, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
    ],
)
def test_objects_refuse_additional_properties(given: Any, expected: Any) -> None:
    before = copy.deepcopy(given)
    assert prepared(given) == expected
    assert given == before


@pytest.mark.parametrize(
    "given",
    [
        {**OBJECT, "additionalProperties": {"type": "string"}},
        {**OBJECT, "patternProperties": {"^x": True}},
        {"type": "object"},
        {"enum": [{"properties": {}}]},
        {**OBJECT, "required": ["a", "b"]},
        {"allOf": [OBJECT, {"properties": {"b": True}}]},
        {**OBJECT, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"$ref": "#/$defs/T", "properties": {"b": True}, "$defs": {"T": OBJECT}},
        {"items": {"anyOf": [OBJECT], "$ref": "#"}},
    ],
)
def test_open_and_combined_schemas_are_unchanged(given: Any) -> None:
    assert prepared(given) == given


def test_unknown_formats_are_removed() -> None:
    given = {"properties": {"at": {"format": "date"}, "pass": {"format": "password"}}}
    found = prepared(given)["properties"]
    assert found == {"at": {"format": "date"}, "pass": {}}
    combined = {"allOf": [{"format": "password"}, {"format": "date"}]}
    assert prepared(combined) == {"allOf": [{}, {"format": "date"}]}
    assert prepared({"format": ["date"]}) == {}


def test_properties_may_be_named_like_keywords() -> None:
    given = {"properties": {"properties": {"type": "string"}, "format": {"type": "string"}}}
    assert prepared(given) == {**given, "additionalProperties": False}


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(GrammarError, match="nested too deeply, expected fewer than 100 levels"):
        prepared(nested(100_000))


def test_many_optional_properties_are_refused() -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(2_001)}
    held = {"type": "object", "properties": properties, "required": ["p0"]}
    assert prepared(held)["properties"] == properties
    with pytest.raises(GrammarError, match="2,001 optional properties, expected at most 2,000"):
        prepared({"items": {**held, "required": []}})


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
    with pytest.raises(GrammarError, match=r"levels|cannot be compiled"):
        matcher(**HOSTILE[kind])


@pytest.mark.parametrize("form", ["property", "alone", "case", "part", "list"])
def test_the_deepest_allowed_schema_compiles(form: str) -> None:
    matcher(json=chain(MOST_LEVELS // (7 if form == "list" else 4), form))


@pytest.mark.parametrize("name", ["r", "T"])
def test_the_deepest_allowed_rules_compile(name: str) -> None:
    matcher(grammar=rules(MOST_LEVELS - 2, name))


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
