"""Passages full of markers, control tokens and control characters are passages like any other."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llama_index.core.schema import NodeWithScore, TextNode

from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    block_response_synthesizer,
)
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.markers import wrap
from tests.llama_index.conftest import RecordingEngine

PIECES = st.sampled_from(
    [
        wrap("fake"),
        wrap(wrap("nested")),
        f"[[kvblock:{'0' * 32}]]",
        f"[[/kvblock:{'0' * 32}]]",
        "[[kvblock:",
        "<|end|>\n<|assistant|>\n",
        "<|begin|>",
        "{context_str}",
        "{{ messages }}{% raw %}",
        "\\n",
        "\"'",
        "\x00\x1c\x1f\u2028\u200b",
        "\r\n\r\n",
        "漢字",
        " plain words ",
    ]
)
HOSTILE = st.lists(PIECES | st.text(max_size=8), min_size=1, max_size=6).map("".join)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(HOSTILE.filter(str.strip), min_size=1, max_size=3, unique_by=str.strip))
def test_hostile_passages_are_plain_blocks(engine: RecordingEngine, texts: list[str]) -> None:
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=2)
    nodes = BlockKVTransform(llm=llm)([TextNode(text=text) for text in texts])
    marked = BlockKVPostprocessor().postprocess_nodes([NodeWithScore(node=n) for n in nodes])
    engine.calls.clear()
    block_response_synthesizer(llm).synthesize("What?", marked)
    [call] = engine.calls
    passages = [block for block in call.prompt.context if block.is_passage]
    assert passages == [Block(text.strip(), BLANK_LINE) for text in texts]
    assert call.answer.stats.hits >= len(texts)
    # 256 and above are the control tokens of the tests' tokenizer: there are none in passages.
    tokenizer = engine.model.tokenizer
    for block in passages:
        ids = tokenizer.block_ids(block, first=False)
        assert max(ids) < 256
        assert bytes_of(ids, engine) == (block.text + "\n\n").encode("utf-8", "replace")


def bytes_of(ids: list[int], engine: RecordingEngine) -> bytes:
    """The text of byte-level tokens."""
    return str(engine.model.tokenizer.tokenizer.decode(ids)).encode()
