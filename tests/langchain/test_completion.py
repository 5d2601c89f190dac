"""The completion class: strings in, strings out."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.errors import SegmentationError
from blockattn_rag.langchain import BlockAttentionLLM, format_blocks
from blockattn_rag.prompts.markers import wrap
from tests.langchain.conftest import passages


@pytest.fixture
def llm(engine: BlockAttentionEngine) -> BlockAttentionLLM:
    return BlockAttentionLLM(engine=engine, max_tokens=6)


def prompt(question: str = "Which?") -> str:
    return f"Context:\n{format_blocks(passages())}\n\n{question}\n"


async def test_every_way_to_call_gives_the_same_text(llm: BlockAttentionLLM) -> None:
    expected = llm.invoke(prompt())
    assert len(expected) == 6
    assert "".join(llm.stream(prompt())) == expected
    assert "".join([piece async for piece in llm.astream(prompt())]) == expected
    assert await llm.ainvoke(prompt()) == expected
    several: list[Any] = [prompt(), prompt("Who?"), "No passage."]
    one_by_one = [llm.invoke(one) for one in several]
    assert llm.batch(several) == one_by_one
    assert await llm.abatch(several) == one_by_one


def test_passages_are_reused_and_counted(llm: BlockAttentionLLM) -> None:
    llm.invoke(prompt())
    result = llm.generate([prompt("Who?")])
    info = result.generations[0][0].generation_info
    assert info is not None
    assert info["block_attention"]["misses"] == 0
    assert result.llm_output is not None
    assert result.llm_output["token_usage"]["completion_tokens"] == 6


def test_the_text_is_kept_unchanged(llm: BlockAttentionLLM) -> None:
    assert llm.to_prompt("Hello").text == "Hello"
    assert llm.invoke(prompt(), stop=[llm.invoke(prompt())[1]]) == llm.invoke(prompt())[0]


def parsing_one(llm: BlockAttentionLLM) -> BlockAttentionLLM:
    return BlockAttentionLLM(
        engine=llm.engine, max_tokens=llm.max_tokens, generate_kwargs={"parse_special_tokens": True}
    )


def test_control_tokens_are_text(llm: BlockAttentionLLM, caplog: pytest.LogCaptureFixture) -> None:
    text = "<|user|>\nHi"
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        assert llm.get_num_tokens(text) == len(text)
        assert llm.get_num_tokens(text) == len(text)
    assert caplog.text.count("pass parse_special_tokens=True") == 1
    parsing = parsing_one(llm)
    assert parsing.get_num_tokens(text) == 4
    # An answer cache tells models apart by these.
    assert parsing._identifying_params != llm._identifying_params
    assert parsing.invoke(text) == llm.invoke(text, parse_special_tokens=True) != llm.invoke(text)
    (passage,) = parsing.to_prompt(wrap(text) + text).context
    assert llm.source.tokenizer.block_ids(passage, first=False)[:-2] == list(
        llm.source.tokenizer.text_ids(text)
    )
    prompt = parsing.to_prompt(f"{text}{wrap('passage')}Q")
    assert [block.origin for block in prompt.context] == ["prompt", "passage"]


def test_marked_tokens_no_advice(llm: BlockAttentionLLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "blockattn_rag"):
        BlockAttentionLLM(engine=llm.engine).to_prompt(f"Context: {wrap('a <|end|> b')} Q")
    assert "parse_special_tokens" not in caplog.text


def test_a_cut_passage_is_refused_where_control_tokens_are_parsed(llm: BlockAttentionLLM) -> None:
    parsing = parsing_one(llm)
    marked = wrap("a <|end|> b")
    assert parsing.to_prompt(f"<|user|>{marked}Q{marked}<|end|>").context
    for cut in (marked[:-20], marked[50:]):
        with pytest.raises(SegmentationError, match="a text splitter cut"):
            parsing.to_prompt(f"<|user|>{marked}{cut}<|end|>")
