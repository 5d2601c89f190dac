"""Blocks and prompts: construction, comparison and validation."""

from __future__ import annotations

from typing import Any

import pytest

from blockattn_rag.prompts.blocks import Block, BlockPrompt, BlockTemplate, Span

TEMPLATE = BlockTemplate("- ", "\n")


def test_a_block_is_as_private_as_its_most_private_span() -> None:
    template, system = Span("<|system|>", "template"), Span("Be brief.", "system")
    assert Block.of([template, system, template]).origin == "system"
    assert Block.of([template, system, Span("Hi", "conversation")]).origin == "conversation"
    assert Block.of([system, Span("<|user|>Hi", "prompt")]).origin == "prompt"
    assert Block("text").origin == "passage"
    assert Block("text").is_passage
    assert not Block.of([system]).is_passage


def test_every_passage_in_spans_becomes_a_block() -> None:
    prompt = BlockPrompt.from_spans(
        [
            Span("<|user|>", "template"),
            Span("Read: ", "conversation"),
            Span("one", "passage"),
            Span(" \n ", "conversation"),
            Span("two", "passage"),
            Span("Source 3:", "conversation"),
            Span(" three ", "altered"),
            Span("What?", "conversation"),
            Span("<|end|>", "template"),
        ],
        TEMPLATE,
    )
    assert [(b.text, b.origin) for b in prompt.context] == [
        ("<|user|>Read: ", "conversation"),
        ("one", "passage"),
        ("two", "passage"),
        ("Source 3:", "conversation"),
        ("three", "altered"),
    ]
    assert [b.template == TEMPLATE for b in prompt.context] == [False, True, True, False, True]
    assert prompt.final == "What?<|end|>"
    assert prompt.final_spans == (Span("What?", "conversation"), Span("<|end|>", "template"))


def test_from_texts_uses_the_last_text_as_final_and_drops_empty_ones() -> None:
    prompt = BlockPrompt.from_texts(["one", "", Block("two", TEMPLATE), "Q"])
    assert prompt == BlockPrompt((Block("one"), Block("two", TEMPLATE)), "Q")
    assert prompt.text == "one- two\nQ"


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        *((texts, ValueError) for texts in ("a string", [], (), ["", ""], [""])),
        *((texts, TypeError) for texts in ([None, "Q"], [5, "Q"], ["one", None])),
        (["one", Block("final")], TypeError),
    ],
)
def test_a_prompt_without_texts_is_refused(texts: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"Expected (a non-empty list|final)|The prompt is empty|must"):
        BlockPrompt.from_texts(texts)


def test_inconsistent_blocks_and_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Block("")
    with pytest.raises(TypeError, match="Expected Block objects in context, found str"):
        BlockPrompt(("text",), "Q")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must concatenate to its text"):
        Block("text", spans=(Span("other", "passage"),))
    with pytest.raises(ValueError, match="that concatenate to the final text"):
        BlockPrompt((), "text", (Span("other", "prompt"),))
