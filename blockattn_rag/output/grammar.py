"""Answer grammars, parsed from the options of a call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from blockattn_rag.errors import GrammarError

Kind = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""Kinds of grammars, named like the fields of vLLM's ``structured_outputs``."""

MOST_CHARACTERS = 2_000_000
"""Maximum length of a grammar. About 75,000 short choices fit, and compile in half a second."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on answers, not compiled yet.

    Args:
        kind: Kind of ``text``, named as in vLLM.
        text: JSON schema, regular expression, JSON list of choices, Lark grammar, or JSON
            structural tags.
        name: Description for error messages, for example ``"the JSON schema 'Height'"``.
    """

    kind: Kind
    text: str
    name: str

    def __post_init__(self) -> None:
        if len(self.text) > MOST_CHARACTERS:
            raise GrammarError(
                f"An answer's grammar is too long: {self.name} has {len(self.text):,} characters, "
                f"expected at most {MOST_CHARACTERS:,}. Reduce the number of options: retrieve "
                "candidates first, or ask in several steps"
            )

    def __str__(self) -> str:
        return self.name


def choice_grammar(choices: Sequence[str]) -> str:
    """Create a grammar for answers that are one of the choices, in llguidance's dialect of Lark.

    The choices form a single terminal, which the lexer matches as one automaton. As separate rules,
    each choice would use up one of a limited number of parser items.
    """
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return f"%llguidance {{}}\nstart: CHOICE\nCHOICE: {texts}"


def parse_grammar(response_format: Any, structured_outputs: Any) -> Grammar | None:
    """Parse a call's grammar options. Returns None if they allow any text.

    Args:
        response_format: Response format as in OpenAI's API, or a pydantic class.
        structured_outputs: Mapping as in vLLM, with one kind of grammar.
    """
    if response_format is not None and structured_outputs is not None:
        raise ValueError("Pass either response_format or structured_outputs, not both")
    try:
        if structured_outputs is not None:
            return _of_outputs(structured_outputs)
        return None if response_format is None else _of_format(response_format)
    except RecursionError:
        raise GrammarError(
            "A grammar is nested too deeply, expected fewer than 100 levels: flatten the schema, "
            "or make it recursive with $ref"
        ) from None


def _of_format(value: Any) -> Grammar | None:
    schema_of = getattr(value, "model_json_schema", None)
    if isinstance(value, type) and callable(schema_of):
        return _of_schema(schema_of(), value.__name__)
    match value:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return _of_outputs({"json_object": True})
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema, **rest}}:
            return _of_schema(schema, rest.get("name"))
        case {"type": "json_schema"}:
            raise ValueError(
                "response_format of type json_schema must have its schema in "
                f"['json_schema']['schema']; found {_shown(value)}"
            )
        case {"type": kind}:
            raise ValueError(
                "The type of response_format must be json_schema, json_object or text; found "
                f"{_shown(kind)}"
            )
    raise TypeError(
        "response_format must be a pydantic class, or a mapping with a type, such as "
        f"{{'type': 'json_schema', 'json_schema': {{...}}}}; found {_shown(value)}"
    )


def _of_outputs(outputs: Any) -> Grammar:
    if not isinstance(outputs, Mapping):
        raise TypeError(f"structured_outputs must be a mapping; found {_shown(outputs)}")
    present = [name for name, value in outputs.items() if value is not None and value is not False]
    if len(present) != 1 or present[0] not in KINDS:
        raise ValueError(
            f"structured_outputs must have exactly one of {', '.join(KINDS)}; found "
            f"{_shown(outputs)}"
        )
    (kind,) = present
    value = outputs[kind]
    match kind:
        case "json":
            schema = _read(value) if isinstance(value, str) else value
            if not isinstance(schema, Mapping):
                raise TypeError(f"A JSON schema must be an object; found {_shown(value)}")
            return _of_schema(schema)
        case "json_object":
            return Grammar(kind, '{"type":"object"}', "a JSON object")
        case "choice":
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            if not (is_list and value and all(isinstance(item, str) and item for item in value)):
                raise TypeError(
                    f"choice must be a list of non-empty strings; found {_shown(value)}"
                )
            return Grammar(kind, _json(list(value)), f"the choice {_shown(value)}")
        case "structural_tag":
            text = value if isinstance(value, str) else _json(value)
            return Grammar(kind, text, "the structural tag")
    if not isinstance(value, str) or not value:
        raise TypeError(f"{kind} must be a non-empty string; found {_shown(value)}")
    name = f"the regular expression {_shown(value)}" if kind == "regex" else "the grammar"
    return Grammar(kind, value, name)


def _of_schema(schema: Mapping[str, Any], name: Any = None) -> Grammar:
    title = name or schema.get("title")
    shown = f"the JSON schema {str(title)!r}" if title else "the JSON schema"
    return Grammar("json", _json(schema), shown)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"Invalid JSON in a schema: {error}; found {_shown(text)}") from error


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"A schema or tag must be plain JSON; found {_shown(value)}") from error


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} with too many levels"
    return text if len(text) <= 200 else f"{text[:200]}..."
