"""The postprocessor marks every node and orders them."""

from __future__ import annotations

import pytest
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from pydantic import ValidationError

from blockattn_rag.llama_index import BlockKVPostprocessor
from blockattn_rag.prompts.markers import wrap


def scored(*scores: float | None) -> list[NodeWithScore]:
    return [NodeWithScore(node=TextNode(text=f"t{i}"), score=s) for i, s in enumerate(scores)]


def llm_views(nodes: list[NodeWithScore]) -> list[str]:
    return [n.node.get_content(MetadataMode.LLM) for n in nodes]


def test_marks_nodes_that_were_never_stamped() -> None:
    nodes = BlockKVPostprocessor().postprocess_nodes(scored(0.9, 0.1))
    assert llm_views(nodes) == [wrap("t0"), wrap("t1")]
    assert [n.score for n in nodes] == [0.9, 0.1]


def test_keeps_the_order_or_puts_the_best_last() -> None:
    nodes = scored(0.5, None, 0.9, -0.1, 0.5)
    kept = BlockKVPostprocessor().postprocess_nodes(nodes)
    assert [n.text for n in kept] == ["t0", "t1", "t2", "t3", "t4"]
    ascending = BlockKVPostprocessor(order="ascending").postprocess_nodes(nodes)
    assert [n.text for n in ascending] == ["t1", "t3", "t0", "t4", "t2"]


def test_works_after_and_before_other_postprocessors() -> None:
    chain = [SimilarityPostprocessor(similarity_cutoff=0.2), BlockKVPostprocessor()]
    nodes = scored(0.9, 0.1, 0.5)
    for step in (*chain, LongContextReorder(), BlockKVPostprocessor()):
        nodes = step.postprocess_nodes(nodes)
    assert sorted(llm_views(nodes)) == sorted([wrap("t0"), wrap("t2")])


async def test_works_asynchronously_too() -> None:
    nodes = await BlockKVPostprocessor().apostprocess_nodes(scored(0.5))
    assert llm_views(nodes) == [wrap("t0")]


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(ValidationError, match="ascending"):
        BlockKVPostprocessor(order="best")  # type: ignore[arg-type]


def test_survives_to_dict_and_back() -> None:
    again = BlockKVPostprocessor.from_dict(BlockKVPostprocessor(order="ascending").to_dict())
    assert again.order == "ascending"
