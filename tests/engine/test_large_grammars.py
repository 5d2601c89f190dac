"""Large grammars are enforced or refused, and do not delay other requests."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import GrammarError
from blockattn_rag.output.compiler import GrammarCompiler
from blockattn_rag.output.grammar import Grammar
from blockattn_rag.output.tool_formats import FORMATS, calls_grammar
from tests.engines import HOW, MODE, answers
from tests.holding import LONGEST_S
from tests.models import tiny_tokenizer

A = ["Halden is tall.", "It was built in 1931.", "How tall?"]
B = ["The lake is deep.", "Who swims there?"]


def _case(number: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"k": {"const": f"c{number}"}, "v": {"enum": [1, 2]}},
        "required": ["k", "v"],
    }


def _tools(number: int) -> str:
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(number)]
    return calls_grammar(FORMATS["llama3"], tools, tiny_tokenizer(), several=False)


LARGE: dict[str, tuple[dict[str, Any], str]] = {
    "choices": ({"choice": [f"S {i} of H" for i in range(2_500)]}, r"S \d{1,4} of H"),
    "cases": (
        {"json": {"anyOf": [_case(i) for i in range(2_100)]}},
        r'\{ ?"k" ?: ?"c\d{1,4}" ?, ?"v" ?: ?[12] ?\}',
    ),
    "tools": ({"grammar": _tools(2_010)}, r'\{"name": "t\d{1,4}", "parameters": \{\}\}'),
    "optional properties": (
        {"json": {"type": "object", "properties": {f"p{i}": {"const": 1} for i in range(990)}}},
        r'\{ ?("p\d{1,3}" ?: ?1 ?(, ?|(?=\})))*\}',
    ),
}


@HOW
@MODE
@pytest.mark.parametrize("kind", LARGE)
def test_a_large_grammar_constrains_every_answer(
    engine: BlockAttentionEngine, kind: str, how: str, mode: str
) -> None:
    asked, pattern = LARGE[kind]
    options: dict[str, Any] = {"structured_outputs": asked, "max_new_tokens": 48}
    for answer in answers(engine, how, [A, B], mode=mode, **options):
        if answer.finish_reason == "length" and kind == "optional properties":
            cut = answer.text.rpartition(",")[0] + "}"
            assert re.fullmatch(pattern, cut), answer.text
        else:
            assert re.fullmatch(pattern, answer.text), answer.text


def _fails_at_the_third_token() -> dict[str, Any]:
    rules = "\n".join(f'c{i}: "x" "{i}"' for i in range(10_001))
    cases = " | ".join(f"c{i}" for i in range(10_001))
    # The limit is only exceeded after the second letter, which depends on the model.
    return {"grammar": f'start: /[a-z]/ /[a-z]/ "x" case\ncase: {cases}\n{rules}'}


@HOW
@MODE
def test_a_failing_grammar_raises(engine: BlockAttentionEngine, how: str, mode: str) -> None:
    with pytest.raises(GrammarError, match="max is 10000"):
        answers(engine, how, [A, B], structured_outputs=_fails_at_the_third_token(), mode=mode)


def test_a_failing_grammar_does_not_affect_the_rest_of_the_batch(
    engine: BlockAttentionEngine, batch_sizes: list[int]
) -> None:
    asked = _fails_at_the_third_token()
    options: dict[str, Any] = {"max_new_tokens": 12}
    expected = engine.generate(B, **options).token_ids

    async def streamed() -> list[int]:
        *_, last = [chunk async for chunk in engine.astream(B, **options)]
        assert last.generation is not None
        return last.generation.token_ids

    async def both() -> tuple[Any, Any]:
        failing = engine.agenerate(A, structured_outputs=asked, **options)
        return await asyncio.gather(failing, streamed(), return_exceptions=True)

    failure, found = asyncio.run(both())
    assert batch_sizes == [2]
    assert isinstance(failure, GrammarError)
    assert "max is 10000" in str(failure)
    assert found == expected


def test_compiling_does_not_block_the_model(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    compile_one = GrammarCompiler._compile

    def slow(self: GrammarCompiler, given: Grammar) -> Any:
        if given.text == "slow":
            assert may_end.wait(LONGEST_S)
        return compile_one(self, given)

    monkeypatch.setattr(GrammarCompiler, "_compile", slow)
    first = engine.submit(A, structured_outputs={"regex": "slow"})
    try:
        assert engine.submit(A, structured_outputs={"regex": "fast"}).result(10).text == "fast"
        assert engine.submit(B, max_new_tokens=1).result(10).token_ids
        assert not first.answer.done()
    finally:
        may_end.set()
    assert first.result(LONGEST_S).text == "slow"
