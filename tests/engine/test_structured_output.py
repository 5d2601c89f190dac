"""Answers follow their grammar for every kind of request and on every path."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch
from jsonschema import validate
from torch import Tensor

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import GrammarError, IncompleteAnswerError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.constraint import GrammarConstraint
from tests.engines import with_settings
from tests.holding import LONGEST_S, holding

A = ["Halden is tall.", "It was built in 1931.", "How tall?"]
B = ["The lake is deep.", "Who swims there?"]
SCHEMA: dict[str, Any] = {
    "title": "Tower",
    "type": "object",
    "properties": {
        "höhe": {"type": "integer", "minimum": 100, "maximum": 999},
        "kind": {"enum": ["tower", "蓝"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
    },
    "required": ["höhe", "kind", "tags"],
}
OTHER = {"choice": ["yes", "no"]}
NEW = 120


@contextmanager
def busy(engine: BlockAttentionEngine) -> Iterator[None]:
    """Occupy the model, so that requests wait and then share a batch."""
    with holding() as held:
        first = engine.submit(["held"], max_new_tokens=2)
        held.wait_for_token()
        yield
        held.let_go()
        first.result(LONGEST_S)


def by_schema(name: str = "Tower") -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": SCHEMA}}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "full mode": {"mode": "full"},
    "sampling": {"temperature": 2.0, "seed": 5},
    "top_k": {"temperature": 1.0, "seed": 1, "top_k": 2, "top_p": 0.5},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "temperature": 1.0, "seed": 4},
    "penalty": {"repetition_penalty": 1.5},
    "least length": {"min_new_tokens": NEW},
    "a draft": {"mode": "full", "prompt_lookup_num_tokens": 3},
    "promotion": {"recipe": Recipe(promote=1)},
}


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_follows_its_schema(engine: BlockAttentionEngine, way: str) -> None:
    answer = engine.generate(A, response_format=by_schema(), max_new_tokens=NEW, **WAYS[way])
    assert answer.finish_reason == "stop"
    validate(answer.json(), SCHEMA)
    assert answer.token_ids[-1] in engine.model.end_token_ids
    assert not set(answer.token_ids[:-1]) & engine.model.end_token_ids


def test_a_schema_is_enforced_on_the_copy_path(engine: BlockAttentionEngine) -> None:
    engine = with_settings(engine, assembly="copy")
    answer = engine.generate(A, response_format=by_schema(), max_new_tokens=NEW)
    validate(answer.json(), SCHEMA)


def test_rows_have_their_own_grammar(engine: BlockAttentionEngine, batch_sizes: list[int]) -> None:
    asked: list[dict[str, Any]] = [
        {"response_format": by_schema()},
        {"structured_outputs": OTHER},
        {},
        {"structured_outputs": {"regex": "[0-9]{4}"}},
    ]
    prompts = [A, B, A, B]
    options: dict[str, Any] = {"max_new_tokens": NEW}
    alone = [
        engine.generate(one, **options, **how).text for one, how in zip(prompts, asked, strict=True)
    ]
    with busy(engine):
        waiting = [
            engine.submit(one, **options, **how) for one, how in zip(prompts, asked, strict=True)
        ]
    together = [one.result(LONGEST_S).text for one in waiting]
    assert together == alone
    assert batch_sizes == [4]
    validate(json.loads(together[0]), SCHEMA)
    assert together[1] in OTHER["choice"]


def test_streams_and_async_calls_follow_the_grammar(engine: BlockAttentionEngine) -> None:
    options: dict[str, Any] = {"response_format": by_schema(), "max_new_tokens": NEW}
    text = engine.generate(A, **options).text
    assert "".join(chunk.text for chunk in engine.stream(A, **options)) == text

    async def both() -> list[str]:
        streamed = [chunk.text async for chunk in engine.astream(A, **options)]
        return [(await engine.agenerate(A, **options)).text, "".join(streamed)]

    assert asyncio.run(both()) == [text, text]


def test_an_answer_that_was_cut_off_raises(engine: BlockAttentionEngine) -> None:
    stopped = engine.generate(A, response_format=by_schema(), stop=["kind"], max_new_tokens=NEW)
    cut = engine.generate(A, response_format=by_schema(), max_new_tokens=9)
    assert (stopped.finish_reason, cut.finish_reason) == ("stop", "length")
    with pytest.raises(IncompleteAnswerError, match="remove stop strings"):
        stopped.json()
    with pytest.raises(IncompleteAnswerError, match="raise max_new_tokens") as caught:
        cut.json()
    assert caught.value.text == cut.text


def test_invalid_schema_is_refused_first(engine: BlockAttentionEngine) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    named = {"type": "json_schema", "json_schema": {"name": "Numbers", "schema": schema}}
    with pytest.raises(GrammarError, match=r"'Numbers' cannot be compiled.*uniqueItems"):
        engine.generate(A, response_format=named)
    assert not engine.store.stats().entries
    assert engine.generate(A, response_format=by_schema(), max_new_tokens=NEW).json()


def test_a_refused_grammar_does_not_affect_its_batch(engine: BlockAttentionEngine) -> None:
    with busy(engine):
        bad = engine.submit(A, structured_outputs={"json": {"not": {}}})
        good = engine.submit(A, structured_outputs=OTHER)
    assert good.result(LONGEST_S).text in OTHER["choice"]
    with pytest.raises(GrammarError, match='"not"'):
        bad.result(LONGEST_S)


def test_settings_that_forbid_every_token_raise(engine: BlockAttentionEngine) -> None:
    letters = engine.model.tokenizer.tokenizer.convert_tokens_to_ids(list("yn"))
    with pytest.raises(GrammarError, match="No token is left"):
        engine.generate(A, structured_outputs=OTHER, suppress_tokens=letters)


def test_a_grammar_needs_an_end(engine: BlockAttentionEngine) -> None:
    with pytest.raises(ValueError, match="no eos_token_id is set"):
        engine.generate(A, structured_outputs=OTHER, eos_token_id=[])


def test_another_end_token_is_accepted(engine: BlockAttentionEngine) -> None:
    bang, s = engine.model.tokenizer.tokenizer.convert_tokens_to_ids(["!", "s"])
    answer = engine.generate(A, structured_outputs=OTHER, eos_token_id=bang)
    assert answer.text in ("yes!", "no!")
    with pytest.raises(GrammarError, match="No token is left"):  # ending here would be premature
        engine.generate(A, structured_outputs={"choice": ["yes"]}, eos_token_id=s)


def test_an_answer_that_bypasses_its_grammar_raises(engine: BlockAttentionEngine) -> None:
    end = min(engine.model.end_token_ids)

    def bypass(_: Any, ids: Tensor, *, stopping_criteria: Any, **__: Any) -> Tensor:
        for token in (65, end):
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            stopping_criteria(ids, None)
        return ids

    assert engine.generate(A, mode="full", custom_generate=bypass).token_ids == [65, end]
    with pytest.raises(GrammarError, match="options that bypass the grammar"):
        engine.generate(A, mode="full", custom_generate=bypass, structured_outputs=OTHER)


def test_an_error_of_a_grammar_does_not_keep_the_cache(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches: WeakSet[Any] = WeakSet()
    cache_for = BlockModel.cache_for

    def noted(model: BlockModel, *contexts: Any, **options: Any) -> Any:
        caches.add(cache := cache_for(model, *contexts, **options))
        return cache

    def fail(_: object, row: list[int], *__: object, **___: object) -> bool:
        assert caches
        raise GrammarError("The grammar is too complex")

    monkeypatch.setattr(BlockModel, "cache_for", noted)
    monkeypatch.setattr(GrammarConstraint, "_follow", fail)
    with pytest.raises(GrammarError, match="too complex") as raised:
        engine.generate(A, structured_outputs=OTHER)
    gc.collect()
    assert not caches, raised


def test_a_missing_extra_is_reported(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r"Structured output needs llguidance.*\[structured\]"):
        engine.generate(A, structured_outputs={"regex": "[a-c]{3}"})
