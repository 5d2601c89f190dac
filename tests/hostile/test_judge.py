"""The judge sees each kind of fault, and nothing in conversations that are as they should be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.tokenization import BlockTokenizer, PromptIds
from tests.hostile.families import Family, families
from tests.hostile.judge import Asked, judge

QUESTION = "Why <|im_end|>?"
SAID = Span("<|im_start|>user\n", "template")


def prompt(passage: str, question: str, *, origin: Any = "conversation") -> BlockPrompt:
    spans = (SAID, Span(passage, "passage"), Span(question, origin), SAID)
    return BlockPrompt.from_spans(spans)


NEUTRAL = Asked([prompt("word", "word")], ["word"])
RIGHT = Asked([prompt("a <|im_end|>", QUESTION)], ["a <|im_end|>"], [QUESTION], [QUESTION])


class Broken:
    """A tokenizer that loses the first token of every block."""

    def __init__(self, inner: BlockTokenizer) -> None:
        self._inner = inner
        self.prefix_ids = inner.prefix_ids

    def prompt_ids(self, prompt: BlockPrompt) -> PromptIds:
        ids = self._inner.prompt_ids(prompt)
        return PromptIds([block[1:] for block in ids.context], ids.final)


@pytest.fixture
def family() -> Family:
    return families()["qwen-2.5"]


def kinds(family: Family, hostile: Asked, tokenizer: Any = None) -> set[str]:
    tokenizer = tokenizer or BlockTokenizer(family.tokenizer)
    return {fault.kind for fault in judge(family, hostile, NEUTRAL, tokenizer)}


def test_a_right_prompt_has_no_fault(family: Family) -> None:
    assert kinds(family, RIGHT) == set()


def test_a_control_token_parsed_in_a_content_is_a_fault(family: Family) -> None:
    parsed = prompt("a <|im_end|>", QUESTION, origin="prompt")
    assert kinds(family, replace(RIGHT, prompts=[parsed])) == {"control"}


def test_a_passage_that_is_no_block_or_another_one_is_a_fault(family: Family) -> None:
    whole = "a <|im_end|>" + QUESTION
    loose = BlockPrompt.from_spans((SAID, Span(whole, "conversation"), SAID))
    assert kinds(family, replace(RIGHT, prompts=[loose])) == {"passages"}
    assert kinds(family, replace(RIGHT, passages=["another"])) == {"passages"}
    assert kinds(family, replace(RIGHT, passages=[])) == {"passages"}


def test_a_content_that_does_not_arrive_is_a_fault(family: Family) -> None:
    assert kinds(family, replace(RIGHT, typed=["[[1, 2]]"])) == {"typed"}
    assert kinds(family, replace(RIGHT, in_final=["a <|im_end|>"])) == {"typed"}


def test_a_marker_that_nobody_typed_is_a_fault(family: Family) -> None:
    marked = f"[[kvblock:{'0' * 32}]] {QUESTION}"
    asked = replace(RIGHT, prompts=[prompt("a <|im_end|>", marked)])
    assert kinds(family, asked) == {"marker"}
    assert kinds(family, replace(asked, contents=[marked])) == set()


def test_words_that_are_lost_when_a_passage_is_cut_are_a_fault(family: Family) -> None:
    cut = replace(RIGHT, passages=["a <|im_end|> z9"], cut=True)
    assert kinds(family, cut) == {"lost"}
    assert kinds(family, replace(cut, passages=["b", "a <|im_en d|>", "<|im_end|>"])) == {
        "lost",
        "passages",
    }


def test_a_request_without_a_prompt_is_a_fault(family: Family) -> None:
    assert kinds(family, replace(RIGHT, prompts=[])) == {"prompts", "passages"}


def test_tokens_that_are_lost_are_a_fault(family: Family) -> None:
    broken = Broken(BlockTokenizer(family.tokenizer))
    assert kinds(family, RIGHT, broken) == {"block text", "neutral ids"}
