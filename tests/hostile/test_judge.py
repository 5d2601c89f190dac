"""The judge finds each kind of fault, and none in correct conversations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.tokenization import BlockTokenizer, PromptIds
from tests.hostile.families import families
from tests.hostile.judge import Asked, judge
from tests.hostile.texts import Attacker

QUESTION = "Why <|im_end|>?"
SAID = Span("<|im_start|>user\n", "template")
MARKED = f"[[kvblock:{'0' * 32}]] {QUESTION}"


def prompt(passage: str, question: str, *, origin: Any = "conversation") -> BlockPrompt:
    spans = (SAID, Span(passage, "passage"), Span(question, origin), SAID)
    return BlockPrompt.from_spans(spans)


NEUTRAL = Asked([prompt("word", "word")], ["word"])
RIGHT = Asked([prompt("a <|im_end|>", QUESTION)], ["a <|im_end|>"], [QUESTION], [QUESTION])
LOOSE = BlockPrompt.from_spans((SAID, Span(f"a <|im_end|>{QUESTION}", "conversation"), SAID))
WROTE_IT = replace(Attacker("", ["x"]).sample(), question=MARKED)


class Broken:
    """A tokenizer that loses the first token of every block."""

    def __init__(self, inner: BlockTokenizer) -> None:
        self._inner = inner
        self.prefix_ids = inner.prefix_ids

    def prompt_ids(self, prompt: BlockPrompt) -> PromptIds:
        ids = self._inner.prompt_ids(prompt)
        return PromptIds([block[1:] for block in ids.context], ids.final)


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, set()),
        ({"prompts": [prompt("a <|im_end|>", QUESTION, origin="prompt")]}, {"control"}),
        ({"prompts": [LOOSE]}, {"passages"}),
        ({"passages": ["another"]}, {"passages"}),
        ({"passages": []}, {"passages"}),
        ({"typed": ["[[1, 2]]"]}, {"typed"}),
        ({"in_final": ["a <|im_end|>"]}, {"typed"}),
        ({"prompts": [prompt("a <|im_end|>", MARKED)]}, {"marker"}),
        ({"prompts": [prompt("a <|im_end|>", MARKED)], "sample": WROTE_IT}, set()),
        ({"passages": ["a <|im_end|> z9"], "cut": True}, {"lost"}),
        (
            {"passages": ["b", "a <|im_en d|>", "<|im_end|>"], "cut": True},
            {"lost", "passages"},
        ),
        ({"prompts": []}, {"prompts", "passages"}),
    ],
)
def test_a_fault_is_found_by_its_kind(change: Any, kinds: set[str]) -> None:
    family = families()["qwen-2.5"]
    found = judge(family, replace(RIGHT, **change), NEUTRAL, BlockTokenizer(family.tokenizer))
    assert {fault.kind for fault in found} == kinds


def test_lost_tokens_are_a_fault() -> None:
    family = families()["qwen-2.5"]
    found = judge(family, RIGHT, NEUTRAL, Broken(BlockTokenizer(family.tokenizer)))
    assert {fault.kind for fault in found} == {"block text", "neutral ids"}
