"""Stop strings end answers, and are not matched in the prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor

from blockattn_rag import BlockAttentionEngine
from tests.engines import HOW, MODE, Outcome, answers, outcome, tuned_model
from tests.models import tiny_tokenizer
from tests.saying import says

A, B = "Halden Tower is 214 metres tall.", "It was built in 1931."
NEW = 12
PROMPTS = [[A, B, "How tall?"], [B, "And when was that?"], ["No context?"]]


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    """A random model that writes letters."""
    return BlockAttentionEngine(tuned_model(letters="abcdefghijklmnop"))


def outcomes(engine: BlockAttentionEngine, how: str, **options: Any) -> list[Outcome]:
    options = {"max_new_tokens": NEW, **options}
    return [outcome(one) for one in answers(engine, how, PROMPTS, **options)]


@HOW
@MODE
def test_a_stop_string_in_the_prompt_is_ignored(
    engine: BlockAttentionEngine, how: str, mode: str
) -> None:
    free = outcomes(engine, how, mode=mode)
    stop = [f"?{text[:2]}" for text, _, _ in free]
    assert outcomes(engine, how, mode=mode, stop=stop) == free


def test_stop_strings_do_not_span_prompt_and_answer(engine: BlockAttentionEngine) -> None:
    told = says(" height is 214.")
    found = engine.generate([A, "How tall? Answer: The"], stop=["The he"], **told)
    assert (found.text, found.finish_reason) == (" height is 214.", "stop")


@HOW
@MODE
def test_ends_with_the_completing_token(engine: BlockAttentionEngine, how: str, mode: str) -> None:
    free = outcomes(engine, "alone", mode=mode)
    stop = free[0][0][3:6]
    stopped = outcomes(engine, how, mode=mode, stop=stop)
    for (text, ids, _), found in zip(free, stopped, strict=True):
        at = text.find(stop)
        whole, end = (text, "length") if at < 0 else (text[:at], "stop")
        assert found == (whole, ids[: NEW if at < 0 else at + len(stop)], end)


def test_no_token_is_computed_after_a_stop_string(engine: BlockAttentionEngine) -> None:
    class Steps(LogitsProcessor):
        count = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return scores

    (text, _, _), *_ = outcomes(engine, "alone")
    steps: Any = Steps()
    options: dict[str, Any] = {"max_new_tokens": NEW, "logits_processor": [steps]}
    engine.generate(PROMPTS[0], stop=text[3:6], **options)
    assert steps.count == text.index(text[3:6]) + 3


def test_stop_strings_is_an_alias_of_stop(engine: BlockAttentionEngine) -> None:
    (text, _, _), *_ = free = outcomes(engine, "alone")
    stop = text[3:6]
    expected = outcomes(engine, "alone", stop=stop)
    for given in (stop, [stop]):
        options: dict[str, Any] = {"stop_strings": given, "tokenizer": tiny_tokenizer()}
        assert outcomes(engine, "batch", **options) == expected
    config = engine.model.hf_model.generation_config
    assert config is not None
    config.stop_strings = [stop]
    try:
        assert outcomes(engine, "batch") == outcomes(engine, "alone") == expected != free
    finally:
        config.stop_strings = None


@MODE
def test_beams_end_at_stop_strings_of_the_answer(engine: BlockAttentionEngine, mode: str) -> None:
    free = outcomes(engine, "alone", mode=mode, num_beams=2)
    stop = [f"?{text[:2]}" for text, _, _ in free]
    assert outcomes(engine, "alone", mode=mode, num_beams=2, stop=stop) == free
    text, _, _ = free[2]
    options: dict[str, Any] = {"num_beams": 2, "max_new_tokens": NEW}
    found = engine.generate(PROMPTS[2], mode=mode, stop=text[2:5], **options)  # type: ignore[arg-type]
    ids = torch.tensor([engine.model.tokenizer.final_ids(PROMPTS[2][0], first=True)])
    run: Any = engine.model.hf_model.generate
    expected = run(ids, stop_strings=[text[2:5]], tokenizer=tiny_tokenizer(), **options)
    assert found.token_ids == expected[0, ids.shape[1] :].tolist()


def test_a_drafted_answer_ends_at_its_stop_string(engine: BlockAttentionEngine) -> None:
    drafting: Any = {"mode": "full", "max_new_tokens": NEW, "prompt_lookup_num_tokens": 3}
    (text, ids, _), *_ = outcomes(engine, "alone", mode="full")
    found = engine.generate(PROMPTS[0], stop=text[3:6], **drafting)
    end = text.index(text[3:6])
    assert outcome(found) == (text[:end], ids[: end + 3], "stop")


@pytest.mark.parametrize("stop", ["", [], None])
def test_an_empty_stop_list_has_no_effect(engine: BlockAttentionEngine, stop: Any) -> None:
    assert outcomes(engine, "alone", stop=stop) == outcomes(engine, "alone")
