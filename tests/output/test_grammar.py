"""Parsing of structured output options, and validation before compilation."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from pydantic import BaseModel

from blockattn_rag.errors import GrammarError
from blockattn_rag.output.grammar import Grammar, parse_grammar
from tests.output.grammars import nested

SCHEMA = {"title": "Tower", "type": "object", "properties": {"höhe": {"type": "integer"}}}


class Tower(BaseModel):
    höhe: int


def asked(response_format: Any = None, structured_outputs: Any = None) -> Grammar:
    parsed = parse_grammar(response_format, structured_outputs)
    assert parsed is not None
    return parsed


def test_schemas_are_accepted_in_the_formats_of_openai_and_vllm() -> None:
    given = {"type": "json_schema", "json_schema": {"name": "T", "schema": SCHEMA, "strict": True}}
    by_format = asked(given)
    by_outputs = asked(None, {"json": SCHEMA})
    assert json.loads(by_format.text) == json.loads(by_outputs.text) == SCHEMA
    assert (by_format.kind, by_outputs.kind) == ("json", "json")
    assert asked(None, {"json": json.dumps(SCHEMA)}).text == by_outputs.text


def test_the_name_of_a_schema_defaults_to_its_title() -> None:
    named = {"name": "T", "schema": SCHEMA}
    assert str(asked({"type": "json_schema", "json_schema": named})) == "the JSON schema 'T'"
    assert str(asked(None, {"json": SCHEMA})) == "the JSON schema 'Tower'"
    assert str(asked(None, {"json": {}})) == "the JSON schema"


def test_pydantic_classes_are_accepted() -> None:
    found = asked(Tower)
    assert json.loads(found.text) == Tower.model_json_schema()
    assert str(found) == "the JSON schema 'Tower'"


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ({"json_object": True}, '{"type":"object"}'),
        ({"regex": "[0-9]+"}, "[0-9]+"),
        ({"choice": ["ja", "nö"]}, '["ja", "nö"]'),
        ({"grammar": 'start: "x"'}, 'start: "x"'),
        ({"json": None, "regex": "a", "json_object": False}, "a"),
    ],
)
def test_other_kinds_have_the_names_of_vllm(outputs: dict[str, Any], text: str) -> None:
    found = asked(None, outputs)
    assert found.text == text
    assert found.kind in outputs


def test_structural_tags_are_a_mapping_or_text() -> None:
    tags = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
    text = asked(None, {"structural_tag": tags}).text
    assert json.loads(text) == tags
    assert asked(None, {"structural_tag": text}).text == text


def test_grammars_are_compared_by_content_and_can_be_pickled() -> None:
    one, other = asked(Tower), asked(Tower)
    assert one == other
    assert hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != asked(None, {"regex": "a"})


DEEP = nested(100_000)


def test_a_grammar_that_is_too_large_is_refused_with_the_limit() -> None:
    choices = [f"Street {i} of Halden" for i in range(200_000)]
    with pytest.raises(GrammarError, match=r"characters, expected at most 2,000,000. Reduce"):
        parse_grammar(None, {"choice": choices})
    with pytest.raises(GrammarError, match=r"2,000,006 characters, expected at most 2,000,000"):
        parse_grammar(None, {"regex": "a" * 2_000_006})


@pytest.mark.parametrize(
    ("response_format", "outputs", "message"),
    [
        (Tower, {"regex": "a"}, "not both"),
        ("json", None, "response_format must be a pydantic class.*found 'json'"),
        (Tower(höhe=3), None, r"must be a pydantic class.*found Tower\(höhe=3\)"),
        ({"json_schema": {}}, None, "a mapping with a type"),
        ({"type": "yaml"}, None, "must be json_schema, json_object or text; found 'yaml'"),
        ({"type": "json_schema"}, None, "must have its schema in"),
        ({"type": "json_schema", "json_schema": {"name": "T"}}, None, "must have its schema in"),
        (None, {}, "must have exactly one of json, json_object"),
        (None, {"regex": "a", "choice": ["b"]}, "must have exactly one of"),
        (None, {"yaml": "a"}, "must have exactly one of"),
        (None, "a", "structured_outputs must be a mapping"),
        (None, {"json": [1]}, "must be an object; found"),
        (None, {"json": "{"}, "Invalid JSON in a schema"),
        (None, {"json": {"enum": [{1, 2}]}}, "must be plain JSON"),
        (None, {"json": DEEP}, "nested too deeply, expected fewer than 100 levels"),
        (None, {"json": '{"items":' * 100_000}, "nested too deeply"),
        ({"type": "json_schema", "json_schema": {"schema": DEEP}}, None, "nested too deeply"),
        ({"type": "json_schema", "json_schema": DEEP}, None, "must have its schema in"),
        (DEEP, None, "a mapping with a type"),
        (None, DEEP, "must have exactly one of"),
        (None, {"choice": [DEEP]}, "choice must be a list of non-empty strings"),
        (None, {"choice": "abc"}, "choice must be a list of non-empty strings; found 'abc'"),
        (None, {"choice": []}, "choice must be a list of non-empty strings"),
        (None, {"choice": ["a", ""]}, "choice must be a list of non-empty strings"),
        (None, {"regex": 3}, "regex must be a non-empty string; found 3"),
        (None, {"grammar": ""}, "grammar must be a non-empty string; found ''"),
    ],
)
def test_other_formats_are_refused(response_format: Any, outputs: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        parse_grammar(response_format, outputs)
