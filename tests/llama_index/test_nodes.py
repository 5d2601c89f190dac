from __future__ import annotations

import pickle
from typing import Any

import pytest
from llama_index.core.postprocessor import LongContextReorder, SimilarityPostprocessor
from llama_index.core.schema import (
    BaseNode,
    Document,
    ImageNode,
    IndexNode,
    MediaResource,
    MetadataMode,
    Node,
    NodeWithScore,
    TextNode,
)
from pydantic import ValidationError

from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.llama_index import BlockKVPostprocessor, BlockNode, as_block_node, canonical_text
from blockattn_rag.llama_index.nodes import as_plain_node, stamp
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.prompts.markers import segment, wrap

SHARED: dict[str, Any] = {"id_": "n", "metadata": {"title": "T"}}
NODES: list[BaseNode] = [
    TextNode(text=" body ", **SHARED),
    IndexNode(text=" body ", index_id="i", **SHARED),
    ImageNode(text=" body ", image="aGk=", **SHARED),
    Document(text=" body ", **SHARED),
    Node(text_resource=MediaResource(text=" body "), **SHARED),
]
ids = [type(node).__name__ for node in NODES]


@pytest.mark.parametrize("node", NODES, ids=ids)
def test_only_the_llm_view_carries_markers(node: BaseNode) -> None:
    view = as_block_node(stamp(node, canonical_text(node)))
    assert view.get_content(MetadataMode.LLM) == wrap(node.get_content(MetadataMode.LLM))
    for mode in (MetadataMode.NONE, MetadataMode.EMBED):
        assert view.get_content(mode) == node.get_content(mode)
    assert "kvblock" not in view.get_content(MetadataMode.ALL)
    assert isinstance(view, type(node))
    assert view.class_name() == node.class_name()


@pytest.mark.parametrize("node", NODES, ids=ids)
def test_a_view_is_pickled_and_serialized_like_its_node(node: BaseNode) -> None:
    view = as_block_node(node, label="Source 1:\n")
    again = pickle.loads(pickle.dumps(view))
    assert isinstance(again, BlockNode)
    assert again.get_content(MetadataMode.LLM) == view.get_content(MetadataMode.LLM)
    assert view.hash == node.hash
    assert "block_label" not in view.model_dump()
    assert as_plain_node(view).get_content(MetadataMode.LLM) == node.get_content(MetadataMode.LLM)


@pytest.mark.parametrize("node", NODES, ids=ids)
def test_the_node_itself_is_not_changed(node: BaseNode) -> None:
    before = node.model_dump()
    view = as_block_node(stamp(node, "x"))
    view.metadata["more"] = 1
    view.excluded_llm_metadata_keys.append("title")
    assert node.model_dump() == before


def test_changed_text_gets_a_new_digest_and_ignores_the_old_handle() -> None:
    view = as_block_node(stamp(TextNode(text="old"), "old"))
    view.set_content("new")
    assert view.get_content(MetadataMode.LLM) == wrap("new")
    assert view.metadata[HANDLE_KEY] == handle_of("old")


def test_the_canonical_text_excludes_the_handle() -> None:
    node = TextNode(text="body", metadata={HANDLE_KEY: "0" * 32, "title": "T"})
    assert canonical_text(node) == "title: T\n\nbody"
    assert canonical_text(as_block_node(node)) == "title: T\n\nbody"
    [block] = segment(as_block_node(node).get_content(MetadataMode.LLM)).context
    assert block.text == "title: T\n\nbody"


def test_views_of_nodes_without_text_are_empty() -> None:
    for node in (TextNode(text=" \n"), Node(image_resource=MediaResource(data=b"hi"))):
        assert canonical_text(node) == ""
        assert as_block_node(node).get_content(MetadataMode.LLM) == ""


def test_content_blocks_have_one_marked_text_and_the_others() -> None:
    node = Node(text_resource=MediaResource(text="body"), image_resource=MediaResource(data=b"hi"))
    text, image = as_block_node(node).get_content_blocks(MetadataMode.LLM)
    assert getattr(text, "text") == wrap("body")  # noqa: B009 -- a union of block types
    assert type(image).__name__ == "ImageBlock"
    plain = as_block_node(node).get_content_blocks(MetadataMode.NONE)
    assert getattr(plain[0], "text") == "body"  # noqa: B009


def test_custom_node_classes_keep_their_own_text() -> None:
    class Shouting(TextNode):
        def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
            return self.text.upper()

    view = as_block_node(Shouting(text="hey"))
    assert view.get_content(MetadataMode.LLM) == wrap("HEY")
    assert view.get_content() == "HEY"
    assert NodeWithScore(node=view).text == "hey"


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
