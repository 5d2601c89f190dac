"""Blocks and prompts: what they are made of, what tells them apart, what is refused."""

from __future__ import annotations

import pytest

from blockattn_rag.prompts.blocks import (
    HANDLE_LENGTH,
    Block,
    BlockPrompt,
    BlockTemplate,
    Span,
    handle_of,
    merged,
)

TEMPLATE = BlockTemplate("- ", "\n")


def test_a_handle_is_the_start_of_the_sha256_of_the_text() -> None:
    assert handle_of("abc") == "ba7816bf8f01cfea414140de5dae2223"
    assert len(handle_of("\ud800")) == HANDLE_LENGTH


def test_a_block_is_as_private_as_the_most_private_of_its_spans() -> None:
    template, system = Span("<|system|>", "template"), Span("Be brief.", "system")
    assert Block.of([template, system, template]).origin == "system"
    assert Block.of([template, system, Span("Hi", "conversation")]).origin == "conversation"
    assert Block.of([system, Span("<|user|>Hi", "prompt")]).origin == "prompt"
    assert Block("text").origin == "passage"
    assert Block("text").is_passage
    assert not Block.of([system]).is_passage


def test_neighbouring_spans_of_one_origin_are_one_but_passages_stay_apart() -> None:
    spans = [Span("a", "system"), Span("b", "system"), Span("", "template"), Span("c", "system")]
    assert merged(spans) == (Span("abc", "system"),)
    passages = (Span("a", "passage"), Span("b", "passage"))
    assert merged(passages) == passages


def test_a_prompt_from_spans_makes_a_block_of_every_passage() -> None:
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


def test_a_prompt_from_texts_takes_the_last_as_final_and_leaves_out_empty_ones() -> None:
    prompt = BlockPrompt.from_texts(["one", "", Block("two", TEMPLATE), "Q"])
    assert prompt == BlockPrompt((Block("one"), Block("two", TEMPLATE)), "Q")
    assert prompt.text == "one- two\nQ"


@pytest.mark.parametrize("texts", ["a string", [], (), ["", ""], [""]])
def test_a_prompt_of_nothing_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"expected a non-empty list|the prompt is empty"):
        BlockPrompt.from_texts(texts)


@pytest.mark.parametrize("texts", [[None, "Q"], [5, "Q"], ["one", None], ["one", Block("final")]])
def test_a_prompt_of_other_things_than_texts_is_refused(texts: list[str]) -> None:
    with pytest.raises(TypeError, match="must"):
        BlockPrompt.from_texts(texts)


def test_an_empty_block_and_foreign_context_are_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        Block("")
    with pytest.raises(TypeError, match="context must hold Block objects, found str"):
        BlockPrompt(("text",), "Q")  # type: ignore[arg-type]


def test_spans_that_are_not_the_text_are_refused() -> None:
    with pytest.raises(ValueError, match="must make up its text"):
        Block("text", spans=(Span("other", "passage"),))
    with pytest.raises(ValueError, match="must make up the final text"):
        BlockPrompt((), "text", (Span("other", "prompt"),))
