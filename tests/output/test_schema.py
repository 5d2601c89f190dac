"""Preparation of schemas for compilation."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from blockattn_rag.errors import GrammarError
from blockattn_rag.output.schema import prepared

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
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(GrammarError, match="nested too deeply, expected fewer than 100 levels"):
        prepared(schema)


def test_many_optional_properties_are_refused() -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(2_001)}
    held = {"type": "object", "properties": properties, "required": ["p0"]}
    assert prepared(held)["properties"] == properties
    with pytest.raises(GrammarError, match="2,001 optional properties, expected at most 2,000"):
        prepared({"items": {**held, "required": []}})
