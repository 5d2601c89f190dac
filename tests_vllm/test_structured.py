"""Answers of vLLM in block mode that a schema or a grammar holds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, Field

from blockattn_rag.errors import IncompleteAnswerError, ServingError
from blockattn_rag.remote import RemoteEngine
from blockattn_rag.tools import FORMATS, parse_answer
from blockattn_rag.tools.grammar import calls_grammar
from tests_vllm.reference import Reference
from tests_vllm.server import Server

EXAMPLES = Path(__file__).parents[1] / "examples"


class Height(BaseModel):
    """How tall something is."""

    kind: Literal["tower", "lake"]
    metres: int = Field(ge=0, le=999)


@pytest.fixture(scope="module")
def server(reference: Reference) -> Iterator[Server]:
    options = reference.options(store=str(reference.folder / "structured"))
    example = yaml.safe_load((EXAMPLES / "serve_bundled.yaml").read_text("utf-8"))
    more = ("--structured-outputs-config", json.dumps(example["structured-outputs-config"]))
    server = Server(options, reference.folder / "structured.log", *more)
    try:
        yield server.wait()
    finally:
        server.close()


def test_an_answer_follows_its_schema_and_its_blocks_are_loaded(
    reference: Reference, engine: RemoteEngine
) -> None:
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
def test_vllm_holds_an_answer_to_a_call_of_a_tool(
    reference: Reference, engine: RemoteEngine, form: str
) -> None:
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


def test_what_vllm_cannot_compile_is_refused_in_its_words(
    reference: Reference, engine: RemoteEngine
) -> None:
    with pytest.raises(ServingError, match=r"regex|parse|grammar|pattern"):
        engine.generate(list(reference.case(35).texts), structured_outputs={"regex": "(["})
