"""Thoughts of reasoning models, and variables of chat templates."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.store import MemoryStore
from tests.adapters.frameworks import EACH, EVERY_WAY, Framework, How
from tests.engines import tuned_model
from tests.models import tiny_tokenizer
from tests.saying import says, thinking_tokenizer

pytestmark = EACH

SAID = "<think>\nIt is deep.\n</think>\n\n31 metres."
OFF, ON = ({"chat_template_kwargs": {"enable_thinking": value}} for value in (False, True))


def engine_with(tokenizer: Any) -> BlockAttentionEngine:
    return BlockAttentionEngine(tuned_model(tokenizer), MemoryStore(1 << 28))


@pytest.fixture(scope="module")
def engine() -> BlockAttentionEngine:
    return engine_with(thinking_tokenizer())


@EVERY_WAY
def test_thoughts_are_separated_from_the_answer(
    framework: Framework, engine: BlockAttentionEngine, how: How
) -> None:
    found = framework.ask(framework.chat(engine), how, **says(SAID))
    assert (found.text, found.thoughts) == ("31 metres.", "It is deep.")


def test_without_thought_delimiters_everything_is_the_answer(framework: Framework) -> None:
    chat = framework.chat(engine_with(tiny_tokenizer()))
    found = framework.ask(chat, "whole", **says(SAID))
    assert (found.text, found.thoughts) == (SAID, "")


@EVERY_WAY
def test_variables_of_a_call_override_those_of_the_model(
    framework: Framework, engine: BlockAttentionEngine, how: How
) -> None:
    def tokens(defaults: dict[str, Any], **call: Any) -> int:
        chat = framework.chat(engine, 2, generate_kwargs=defaults)
        reuse = framework.ask(chat, how, "How deep?", **call).reuse
        return int(reuse["reused_tokens"] + reuse["computed_tokens"])

    plain = tokens({})
    off = plain + len("<think>\n\n</think>\n\n")
    assert tokens(OFF) == tokens({}, **OFF) == off
    assert tokens(OFF, **ON) == plain


@pytest.mark.parametrize("where", ["call", "model"])
def test_variables_that_the_template_does_not_read_are_refused(
    framework: Framework, engine: BlockAttentionEngine, where: str
) -> None:
    for value, error, message in (
        ({"enable_thinkin": False}, ValueError, "enable_thinkin in chat_template_kwargs, but the"),
        (["enable_thinking"], TypeError, "Expected chat_template_kwargs to be a mapping"),
    ):
        wrong: dict[str, Any] = {"chat_template_kwargs": value}
        chat = framework.chat(engine, generate_kwargs=wrong if where == "model" else {})
        with pytest.raises(error, match=message):
            framework.ask(chat, "whole", **(wrong if where == "call" else {}))
