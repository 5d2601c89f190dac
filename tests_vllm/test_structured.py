"""Answers of vLLM in block mode that a schema or a grammar holds."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from blockattn_rag.errors import IncompleteAnswerError, ServingError
from blockattn_rag.output import FORMATS, parse_answer
from blockattn_rag.output.tool_formats import calls_grammar
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.protocol import CHAT_COMPLETIONS, COMPLETIONS
from tests_vllm.reference import Reference
from tests_vllm.server import Server


class Height(BaseModel):
    """How tall something is."""

    kind: Literal["tower", "lake"]
    metres: int = Field(ge=0, le=999)


@pytest.fixture
def server(team_server: Server) -> Server:
    return team_server


def test_answer_follows_its_schema(reference: Reference, engine: RemoteEngine) -> None:
    texts = list(reference.case(31).texts)
    for _ in range(2):
        answer = engine.generate(texts, response_format=Height, max_new_tokens=64)
        assert Height.model_validate(answer.json())
    assert answer.stats.mode == "block"
    assert (answer.stats.hits, answer.stats.misses) == (len(texts) - 1, 0)
    last = list(engine.stream(texts, response_format=Height, max_new_tokens=64))[-1]
    assert last.generation is not None
    assert last.generation.json() == answer.json()


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ({"regex": "[0-9]{3} metres"}, "[0-9]{3} metres"),
        ({"choice": ["the tower", "the lake"]}, "the (tower|lake)"),
    ],
)
def test_an_answer_follows_what_vllm_knows_besides(
    reference: Reference, engine: RemoteEngine, option: dict[str, Any], pattern: str
) -> None:
    texts = list(reference.case(32).texts)
    answer = engine.generate(texts, structured_outputs=option, max_new_tokens=32)
    assert re.fullmatch(pattern, answer.text)


def test_an_answer_that_was_cut_is_no_object(reference: Reference, engine: RemoteEngine) -> None:
    texts = list(reference.case(33).texts)
    answer = engine.generate(texts, response_format=Height, max_new_tokens=3)
    with pytest.raises(IncompleteAnswerError):
        answer.json()


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral", "mistral_args", "granite"])
def test_vllm_forces_a_tool_call(reference: Reference, engine: RemoteEngine, form: str) -> None:
    function = {"name": "measure", "parameters": Height.model_json_schema()}
    tokenizer = reference.model.tokenizer.tokenizer
    grammar = calls_grammar(
        FORMATS[form], [{"type": "function", "function": function}], tokenizer, several=False
    )
    answer = engine.generate(
        list(reference.case(34).texts), structured_outputs={"grammar": grammar}, max_new_tokens=96
    )
    text, calls, invalid = parse_answer(answer.text, FORMATS[form], ["measure"])
    assert (text, invalid, [call.name for call in calls]) == ("", [], ["measure"])
    assert Height.model_validate(calls[0].arguments)


def test_invalid_grammar_is_refused(reference: Reference, engine: RemoteEngine) -> None:
    with pytest.raises(ServingError, match=r"regex|parse|grammar|pattern"):
        engine.generate(list(reference.case(35).texts), structured_outputs={"regex": "(["})


MODES: list[Literal["block", "full"]] = ["block", "full"]


@pytest.mark.parametrize("mode", MODES)
def test_thousands_of_choices_constrain_an_answer(
    reference: Reference, engine: RemoteEngine, mode: Literal["block", "full"]
) -> None:
    texts = list(reference.case(36).texts)
    choices = {"choice": [f"Street {i} of Halden" for i in range(2_500)]}
    answer = engine.generate(texts, structured_outputs=choices, max_new_tokens=48, mode=mode)
    assert re.fullmatch(r"Street \d{1,4} of Halden", answer.text)
    *_, last = engine.stream(texts, structured_outputs=choices, max_new_tokens=48, mode=mode)
    assert last.generation is not None
    assert last.generation.text == answer.text


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
def test_a_long_chain_of_references_ends_no_server(
    reference: Reference, engine: RemoteEngine, mode: Literal["block", "full"]
) -> None:
    texts = list(reference.case(38).texts)
    chain: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(20_000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d20000": {"type": "integer"}}}
    with pytest.raises(ServingError, match=r"20,001 references .* at most 1,000"):
        engine.generate(texts, structured_outputs={"json": schema}, mode=mode)
    assert engine.generate(texts, max_new_tokens=4, mode=mode).token_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["optional", "cases", "tools"])
def test_a_grammar_that_fails_is_refused_with_the_reason(
    reference: Reference,
    engine: RemoteEngine,
    server: Server,
    kind: str,
    mode: Literal["block", "full"],
) -> None:
    texts = list(reference.case(37).texts)
    retries = server.counted("blockattn_retries_total")
    options: dict[str, Any] = {"structured_outputs": _large(kind), "mode": mode}
    with pytest.raises(ServingError, match=r"400.* cannot be followed: .*max is 2000") as raised:
        engine.generate(texts, max_new_tokens=16, **options)
    assert "blocks" not in str(raised.value)
    with pytest.raises(ServingError, match=r"cannot be followed: .*max is 2000"):
        list(engine.stream(texts, max_new_tokens=16, **options))
    assert server.counted("blockattn_retries_total") == retries


def test_too_large_grammar_is_refused(reference: Reference, server: Server) -> None:
    choices = [f"Street {i} of Halden" for i in range(110_000)]
    for path in (COMPLETIONS, CHAT_COMPLETIONS):
        body: dict[str, Any] = {"structured_outputs": {"choice": choices}, "max_tokens": 4}
        key = "prompt" if path == COMPLETIONS else "messages"
        body[key] = "x" if key == "prompt" else [{"role": "user", "content": "x"}]
        refused = server.post(path, body)
        assert refused.status_code == 400
        assert "expected at most 2,000,000" in refused.json()["error"]["message"]
