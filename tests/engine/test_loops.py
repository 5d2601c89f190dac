"""Repetitive answers are ended, for every kind of request."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.results import Generation
from blockattn_rag.errors import IncompleteAnswerError
from blockattn_rag.model import BlockModel
from blockattn_rag.model.repetition import LATER_TOKENS, STRING_TOKENS, TEXT_TOKENS
from tests.engines import HOW, MODE, answers
from tests.models import tiny_model, tiny_tokenizer

WORDS = ["The ", "black ", "cat ", "sat. "]  # one token each
SENTENCE = "".join(WORDS)
PROMPT = ["Halden Tower is tall.", "What sat?"]


def engine_that_writes(cycle: list[str]) -> BlockAttentionEngine:
    """Return an engine over a model that repeats ``cycle`` endlessly."""
    tokenizer: Any = tiny_tokenizer()
    tokenizer.add_tokens(cycle)
    size = len(tokenizer)
    width = size + -size % 4  # rounded up to a multiple of the number of heads
    model: Any = tiny_model("llama", hidden_size=width, vocab_size=size, num_hidden_layers=1)
    ids = tokenizer("".join(cycle), add_special_tokens=False)["input_ids"]
    after = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    with torch.no_grad():
        for layer in model.model.layers:  # attention does not affect the output
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        for token in range(size):
            model.lm_head.weight[after.get(token, ids[0]), token] = 1
    model.config.block_attention = {"test": True}  # prevents the warning about stock models
    return BlockAttentionEngine(BlockModel(model, tokenizer))


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return engine_that_writes(WORDS)


def written(tokens: int) -> str:
    """The first tokens of the repeated sentence."""
    return "".join((WORDS * tokens)[:tokens])


def ask(engine: BlockAttentionEngine, how: str, **options: Any) -> Generation:
    options = {"max_new_tokens": 200, **options}
    first, second = answers(engine, how, [PROMPT, ["What else?"]], **options)
    assert first.text == second.text
    return first


@HOW
@MODE
def test_repetitive_text_is_ended(engine: BlockAttentionEngine, how: str, mode: str) -> None:
    answer = ask(engine, how, mode=mode)
    assert answer.finish_reason == "repetition"
    assert answer.text == written(TEXT_TOKENS)
    assert len(answer.token_ids) == answer.stats.generated_tokens == TEXT_TOKENS


@pytest.mark.parametrize("options", [{"seed": 7}, {"temperature": 0.0}, {"top_p": 0.5}])
def test_guard_stays_on_with_a_seed(engine: BlockAttentionEngine, options: dict[str, Any]) -> None:
    assert ask(engine, "alone", **options).finish_reason == "repetition"


@HOW
@pytest.mark.parametrize(
    "options", [{"do_sample": False}, {"temperature": 1e-4}, {"num_beams": 2}], ids=str
)
def test_explicit_sampling_settings_disable_the_guard(
    engine: BlockAttentionEngine, how: str, options: dict[str, Any]
) -> None:
    answer = ask(engine, how, max_new_tokens=TEXT_TOKENS + 9, **options)
    assert answer.finish_reason == "length"
    assert answer.text == written(TEXT_TOKENS + 9)


def test_an_answer_that_ends_before_the_limit_is_no_loop(engine: BlockAttentionEngine) -> None:
    assert ask(engine, "alone", max_new_tokens=TEXT_TOKENS - 1).finish_reason == "length"
    assert ask(engine, "alone", stop=["sat. " + SENTENCE * 9]).finish_reason == "stop"


@pytest.mark.parametrize("cycle", [["0", ", "], ["0x00", ", "], ["| yes |", "\n"], ["null", ", "]])
def test_repeated_numbers_rows_and_constants_are_not_loops(cycle: list[str]) -> None:
    answer = ask(engine_that_writes(cycle), "alone")
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 200)


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "string"}, "c": {"enum": ["yes"]}},
    "required": ["a", "b", "c"],
}


@HOW
@MODE
def test_a_repetitive_string_is_closed(engine: BlockAttentionEngine, how: str, mode: str) -> None:
    pytest.importorskip("llguidance")
    answer = ask(engine, how, mode=mode, structured_outputs={"json": SCHEMA})
    assert answer.finish_reason == "repetition"
    found = answer.json()
    assert found["c"] == "yes"
    assert found["a"] == written(STRING_TOKENS)
    assert found["b"] == written(LATER_TOKENS)  # ends sooner, because the loop is already known


def test_explicit_sampling_settings_do_not_close_strings(engine: BlockAttentionEngine) -> None:
    pytest.importorskip("llguidance")
    answer = ask(engine, "alone", structured_outputs={"json": SCHEMA}, do_sample=False)
    assert answer.finish_reason == "length"
    with pytest.raises(IncompleteAnswerError, match="was cut off at its token limit"):
        answer.json()


def test_json_ended_for_repetition_without_a_grammar_raises(engine: BlockAttentionEngine) -> None:
    with pytest.raises(IncompleteAnswerError, match="it repeated itself: pass a schema"):
        ask(engine, "alone").json()
