"""vLLM answers in block mode that follow a schema or a grammar."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from blockattn_rag.output import FORMATS, parse_answer
from blockattn_rag.output.answers import complete_json
from blockattn_rag.output.tool_formats import calls_grammar
from tests_vllm.reference import Reference
from tests_vllm.server import CHATS, COMPLETIONS, Server


class Height(BaseModel):
    """How tall something is."""

    kind: Literal["tower", "lake"]
    metres: int = Field(ge=0, le=999)


@pytest.fixture
def server(team_server: Server) -> Server:
    return team_server


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "height", "schema": Height.model_json_schema()},
}


def asked(reference: Reference, number: int, **more: Any) -> dict[str, Any]:
    return reference.case(number).body(min_tokens=0, max_tokens=64, **more)


def test_an_answer_follows_its_schema(reference: Reference, server: Server) -> None:
    body = asked(reference, 31, response_format=FORMAT)
    for _ in range(2):
        answer = server.ask(body)
        assert Height.model_validate(complete_json(answer.text, answer.reason))
    assert (answer.report["mode"], answer.report["misses"]) == ("block", 0)
    events = [*server.events(COMPLETIONS, body)]
    assert "".join(one["text"] for event in events for one in event["choices"]) == answer.text


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ({"regex": "[0-9]{3} metres"}, "[0-9]{3} metres"),
        ({"choice": ["the tower", "the lake"]}, "the (tower|lake)"),
    ],
)
def test_other_structured_outputs_of_vllm_are_supported(
    reference: Reference, server: Server, option: dict[str, Any], pattern: str
) -> None:
    answer = server.ask(asked(reference, 32, structured_outputs=option))
    assert re.fullmatch(pattern, answer.text)


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "mistral_args", "granite"])
def test_vllm_forces_a_tool_call(reference: Reference, server: Server, form: str) -> None:
    function = {"name": "measure", "parameters": Height.model_json_schema()}
    tokenizer = reference.model.tokenizer.tokenizer
    grammar = calls_grammar(
        FORMATS[form], [{"type": "function", "function": function}], tokenizer, several=False
    )
    body = asked(reference, 34, structured_outputs={"grammar": grammar})
    answer = server.ask({**body, "max_tokens": 96, "skip_special_tokens": False})
    text, calls, invalid = parse_answer(answer.text, FORMATS[form], ["measure"])
    assert (text, invalid, [call.name for call in calls]) == ("", [], ["measure"])
    assert Height.model_validate(calls[0].arguments)


def test_invalid_grammar_is_refused(reference: Reference, server: Server) -> None:
    message = server.refusal(asked(reference, 35, structured_outputs={"regex": "(["}))
    assert re.search("regex|parse|grammar|pattern", message)


MODES: list[Literal["block", "full"]] = ["block", "full"]


@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_choices_constrain_an_answer(
    reference: Reference, server: Server, mode: Literal["block", "full"]
) -> None:
    choices = {"choice": [f"Street {i} of Halden" for i in range(2_500)]}
    body = asked(reference, 36, structured_outputs=choices, blockattn={"mode": mode})
    answer = server.ask(body)
    assert re.fullmatch(r"Street \d{1,4} of Halden", answer.text)
    events = [*server.events(COMPLETIONS, body)]
    assert "".join(one["text"] for event in events for one in event["choices"]) == answer.text


def _large(kind: str) -> dict[str, Any]:
    if kind == "optional":
        properties = {f"p{i}": {"const": 1} for i in range(990)}
        return {"json": {"type": "object", "properties": properties}}
    if kind == "cases":
        names = [f"c{i}" for i in range(2_100)]
        cases = [
            {"type": "object", "properties": {name: {"const": 1}}, "required": [name]}
            for name in names
        ]
        return {"json": {"anyOf": cases}}
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(2_010)]
    return {"grammar": calls_grammar(FORMATS["llama3"], tools, None, several=False)}


@pytest.mark.parametrize("mode", MODES)
def test_a_long_chain_of_references_does_not_crash_the_server(
    reference: Reference, server: Server, mode: Literal["block", "full"]
) -> None:
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d20000": {"type": "integer"}}}
    body = asked(reference, 38, blockattn={"mode": mode})
    message = server.refusal({**body, "structured_outputs": {"json": schema}})
    assert re.search("20,001 references .* at most 1,000", message)
    assert server.ask(body).tokens


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["optional", "cases", "tools"])
def test_a_grammar_that_fails_is_refused_with_the_reason(
    reference: Reference, server: Server, kind: str, mode: Literal["block", "full"]
) -> None:
    retries = server.counted("blockattn_retries_total")
    body = asked(reference, 37, structured_outputs=_large(kind), blockattn={"mode": mode})
    message = server.refusal(body)
    assert re.search("cannot be constrained by its grammar: .*max is 2000", message)
    assert "blocks" not in message
    events = [*server.events(COMPLETIONS, body)]
    assert re.search(
        "cannot be constrained by its grammar: .*max is 2000", events[-1]["error"]["message"]
    )
    assert server.counted("blockattn_retries_total") == retries


def test_too_large_grammar_is_refused(reference: Reference, server: Server) -> None:
    choices = {"choice": [f"Street {i} of Halden" for i in range(110_000)]}
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHATS, chat)):
        message = server.refusal({**body, "structured_outputs": choices, "max_tokens": 4}, path)
        assert "expected at most 2,000,000" in message
