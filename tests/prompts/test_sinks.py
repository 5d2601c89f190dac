"""Sinks: text forms, tokens, and digests of blocks that are encoded after them."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.prompts.formats import CHAT, Passage
from blockattn_rag.prompts.sinks import check_sink, sink_ids
from blockattn_rag.prompts.tokenization import BlockTokenizer
from tests.models import CHAT_TEMPLATE, tiny_tokenizer


@pytest.mark.parametrize("sink", ["none", "bos", "head", "head:1", "head:16"])
def test_valid_sinks_are_accepted(sink: str) -> None:
    assert check_sink(sink) == sink


@pytest.mark.parametrize(
    "sink", ["", "heads", "first-block", "head:0", "head:-1", "head:1.5", "BOS", "4", 4, None]
)
def test_invalid_sinks_are_refused_with_the_valid_forms(sink: Any) -> None:
    with pytest.raises(ValueError, match=r"Unknown sink .*: expected .*'head:N'"):
        check_sink(sink)


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("bos", [True, False])
def test_a_head_equals_the_start_of_the_models_prompts(bos: bool, chat: bool) -> None:
    tokenizer = BlockTokenizer(tiny_tokenizer(bos=bos, chat=chat))
    prompt = CHAT.prompt("Why?", [Passage("", "Because.")], tokenizer.tokenizer)
    first, *_ = tokenizer.prompt_ids(prompt).context
    assert sink_ids("head:4", tokenizer) == first[:4]
    assert sink_ids("head", tokenizer) == first
    assert sink_ids("none", tokenizer) == []


def test_a_head_does_not_depend_on_the_date() -> None:
    today = "{{ strftime_now('%d %b %Y') }}"
    llama = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
    for start, found in ((today, "You are"), (llama + "{% endif %}{{ date_string }}", "01 Jan 20")):
        tokenizer = tiny_tokenizer(chat=start + CHAT_TEMPLATE)
        text = str(tokenizer.decode(sink_ids("head", BlockTokenizer(tokenizer))))
        assert text.removeprefix("<|begin|>").startswith(found)


def test_sinks_that_the_model_cannot_provide_are_refused() -> None:
    tokenizer = BlockTokenizer(tiny_tokenizer())
    assert sink_ids("bos", tokenizer) == [256]
    with pytest.raises(ValueError, match=r"'head:9999', but the head of a prompt has \d+ tokens"):
        sink_ids("head:9999", tokenizer)
    without = BlockTokenizer(tiny_tokenizer(bos=False, chat=False))
    with pytest.raises(ValueError, match="no BOS token: use sink='head:1'"):
        sink_ids("bos", without)
