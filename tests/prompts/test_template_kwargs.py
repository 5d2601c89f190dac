"""Variables of chat templates: detection, use and validation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from blockattn_rag.prompts.chat_template import (
    check_template_kwargs,
    render_chat,
    template_variables,
)
from tests import chat_templates
from tests.saying import thinking_tokenizer

TURN = [{"role": "user", "content": "How?"}]


def of(template: Any) -> Any:
    return SimpleNamespace(chat_template=template)


@pytest.mark.parametrize(
    ("template", "known"),
    [
        (chat_templates.QWEN3, {"enable_thinking"}),
        (chat_templates.SMOLLM3, {"xml_tools"}),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}{{ messages }}", {"a"}),
        ("{% set b = b if b is defined else 1 %}{% generation %}{{ b }}{% endgeneration %}", {"b"}),
        ("{% for m in messages %}{% set x = m %}{% break %}{% endfor %}{{ bos_token }}", set()),
        ({"default": "{{ one }}", "tool_use": "{{ two }}"}, {"one", "two"}),
        (None, set()),
    ],
)
def test_finds_the_variables_of_a_template(template: Any, known: set[str]) -> None:
    assert template_variables(of(template)) == known


def test_a_variable_reaches_the_template() -> None:
    tokenizer = thinking_tokenizer()
    given = check_template_kwargs(tokenizer, {"enable_thinking": False})
    assert render_chat(tokenizer, TURN).endswith("<|assistant|>\n")
    asked = tokenizer.apply_chat_template(TURN, tokenize=False, add_generation_prompt=True, **given)
    assert asked.endswith("<|assistant|>\n<think>\n\n</think>\n\n")
    assert (check_template_kwargs(tokenizer, None), check_template_kwargs(of(None), {})) == ({}, {})


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"enable_thinkin": False}, ValueError, "enable_thinkin in .* only uses: enable_thin"),
        ({"tools": []}, ValueError, "tools in chat_template_kwargs, which this package sets"),
        ({"add_generation_prompt": False}, ValueError, "Found add_generation_prompt in"),
        (["enable_thinking"], TypeError, "to be a mapping"),
        ({1: 2}, TypeError, "to be a mapping"),
    ],
)
def test_unread_and_reserved_variables_are_refused(
    given: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        check_template_kwargs(thinking_tokenizer(), given)


def test_without_a_template_there_are_no_variables() -> None:
    with pytest.raises(ValueError, match="only uses: none"):
        check_template_kwargs(of(None), {"enable_thinking": False})
