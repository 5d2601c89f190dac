"""Tokens of blocks: each block alone, BOS once, passages never parsed for control tokens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockattn_rag.blocks import Block, BlockPrompt, BlockTemplate
from blockattn_rag.tokenization import BlockTokenizer
from tests.models import tiny_tokenizer

BOS, END, DOC_START, DOC_END = 256, 257, 262, 263
CONTROL = "<|begin|><|end|><|user|><|doc_start|>"
any_text = st.text(st.characters(exclude_categories=()), min_size=1)

with_bos = BlockTokenizer(tiny_tokenizer())
without_bos = BlockTokenizer(tiny_tokenizer(bos=False))


def decoded(ids: list[int]) -> str:
    return str(with_bos.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def test_bos_comes_once_at_the_first_token_of_the_prompt() -> None:
    assert with_bos.prefix_ids == [BOS]
    for texts in (["one", "two", "Q"], ["Q"], ["one", "<|begin|>Q"]):
        ids = with_bos.prompt_ids(BlockPrompt.from_texts(texts))
        assert ids.flat[0] == BOS
    assert with_bos.prompt_ids(BlockPrompt.from_texts(["one", "two", "Q"])).flat.count(BOS) == 1


def test_bos_that_the_chat_template_wrote_does_not_come_twice() -> None:
    for prompt in (
        BlockPrompt((), "<|begin|>Q"),
        BlockPrompt((Block("<|begin|>system", control=True),), "Q"),
    ):
        assert with_bos.prompt_ids(prompt).flat.count(BOS) == 1


def test_a_tokenizer_without_bos_adds_nothing() -> None:
    assert without_bos.prefix_ids == []
    assert len(without_bos.prompt_ids(BlockPrompt.from_texts(["one", "Q"])).flat) == 4


@given(any_text)
def test_passages_hold_no_control_token_whatever_their_text(text: str) -> None:
    ids = with_bos.block_ids(Block(text + CONTROL + text), first=False)
    assert max(ids) < BOS
    assert decoded(ids) == (text + CONTROL + text).encode("utf-8", "replace").decode()


def test_the_first_passage_holds_bos_and_no_other_control_token() -> None:
    ids = with_bos.block_ids(Block(CONTROL), first=True)
    assert ids[0] == BOS
    assert max(ids[1:]) < BOS


def test_control_tokens_are_parsed_in_templates_and_final_text_alone() -> None:
    template = BlockTemplate("<|doc_start|>", "<|doc_end|>")
    ids = with_bos.block_ids(Block("<|end|>", template), first=False)
    assert (ids[0], ids[-1]) == (DOC_START, DOC_END)
    assert max(ids[1:-1]) < BOS
    assert with_bos.block_ids(Block("<|end|>", control=True), first=False) == [END]
    assert with_bos.final_ids("<|end|>", first=False) == [END]


@given(st.lists(any_text, min_size=1, max_size=4))
def test_the_ids_of_a_block_do_not_depend_on_its_neighbours(texts: list[str]) -> None:
    ids = with_bos.prompt_ids(BlockPrompt.from_texts([*texts, "Q"])).context
    alone = [with_bos.block_ids(Block(t), first=i == 0) for i, t in enumerate(texts)]
    assert ids == alone


def test_a_template_without_control_tokens_is_tokenised_together_with_the_text() -> None:
    block = Block("text", BlockTemplate("- ", "\n"))
    assert decoded(with_bos.block_ids(block, first=False)) == "- text\n"


def test_lone_surrogates_become_question_marks_instead_of_failing() -> None:
    assert decoded(with_bos.block_ids(Block("a\ud800b"), first=False)) == "a?b"
    assert decoded(with_bos.final_ids("a\ud800b", first=False)) == "a?b"


def test_the_last_block_becomes_final_where_the_final_text_is_empty() -> None:
    ids = with_bos.prompt_ids(BlockPrompt.from_texts(["one", "two", ""]))
    assert [decoded(block) for block in ids.context] == ["<|begin|>one"]
    assert decoded(ids.final) == "two"


def test_a_prompt_of_no_token_is_refused() -> None:
    class Mute(type(without_bos.tokenizer)):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> dict[str, list[int]]:
            return {"input_ids": []}

    mute = tiny_tokenizer(bos=False)
    mute.__class__ = Mute
    with pytest.raises(ValueError, match="holds no token"):
        BlockTokenizer(mute).prompt_ids(BlockPrompt.from_texts(["one", "two"]))


def test_threads_do_not_mix_up_what_is_parsed() -> None:
    # Whether control tokens are parsed is state of the backend: without the lock this fails.
    passage, final = Block("<|end|>" * 20), "<|end|>" * 20
    wrong: list[list[int]] = []

    def work() -> None:
        for _ in range(150):
            if max(ids := with_bos.block_ids(passage, first=False)) >= BOS:
                wrong.append(ids)
            if (ids := with_bos.final_ids(final, first=False)) != [END] * 20:
                wrong.append(ids)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_fingerprint_covers_vocabulary_and_prefix_but_not_padding() -> None:
    assert BlockTokenizer(tiny_tokenizer()).fingerprint == with_bos.fingerprint
    assert without_bos.fingerprint != with_bos.fingerprint
    padded = BlockTokenizer(tiny_tokenizer())
    padded.tokenizer(["a", "long text"], padding=True, truncation=True, max_length=3)
    assert padded.fingerprint == with_bos.fingerprint
    grown = tiny_tokenizer()
    grown.add_tokens(["<|new|>"])
    assert BlockTokenizer(grown).fingerprint != with_bos.fingerprint
