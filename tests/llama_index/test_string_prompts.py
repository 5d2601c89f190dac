"""Prompt strings: control tokens are text unless the caller requests parsing."""

from __future__ import annotations

import logging

import pytest

from blockattn_rag.errors import SegmentationError
from blockattn_rag.llama_index import BlockAttentionLLM
from blockattn_rag.prompts.markers import wrap
from tests.llama_index.conftest import RecordingEngine

TEXT = "<|user|>\nHi"


@pytest.fixture
def parsing(engine: RecordingEngine) -> BlockAttentionLLM:
    options = {"parse_special_tokens": True}
    return BlockAttentionLLM(engine=engine, max_new_tokens=4, generate_kwargs=options)


def tokens(llm: BlockAttentionLLM, **options: bool) -> int:
    return int(llm.complete(TEXT, formatted=True, **options).raw["usage"]["prompt_tokens"])


def test_control_tokens_are_text(
    llm: BlockAttentionLLM, parsing: BlockAttentionLLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        assert tokens(llm) == tokens(llm) == 1 + len(TEXT)
    assert caplog.text.count("pass parse_special_tokens=True") == 1
    assert tokens(parsing) == tokens(llm, parse_special_tokens=True) == 1 + len("x\nHi")


def test_control_tokens_of_a_passage_are_never_parsed(parsing: BlockAttentionLLM) -> None:
    (passage,) = parsing.to_prompt(wrap(TEXT) + TEXT).context
    ids = parsing.source.tokenizer.block_ids(passage, first=False)
    assert ids[: len(TEXT)] == parsing.source.tokenizer.text_ids(TEXT)
    prompt = parsing.to_prompt(f"{TEXT}{wrap('passage')}Q")
    assert [block.origin for block in prompt.context] == ["prompt", "passage"]


def test_control_tokens_of_a_passage_are_not_logged(
    llm: BlockAttentionLLM, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        llm.to_prompt(f"Context: {wrap('a <|end|> b')} Q")
    assert "parse_special_tokens" not in caplog.text


def test_a_cut_passage_raises_if_control_tokens_are_parsed(parsing: BlockAttentionLLM) -> None:
    marked = wrap("a <|end|> b")
    assert parsing.to_prompt(f"<|user|>{marked}Q{marked}<|end|>").context
    for cut in (marked[:-20], marked[50:]):
        with pytest.raises(SegmentationError, match="a text splitter cut"):
            parsing.to_prompt(f"<|user|>{marked}{cut}<|end|>")
