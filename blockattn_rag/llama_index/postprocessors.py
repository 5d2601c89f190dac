"""Postprocessors of retrieved nodes: one prefetches their KV, one marks them as blocks."""

from __future__ import annotations

from typing import Any, Literal

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.nodes import as_block_node, canonical_text
from blockattn_rag.prompts.blocks import Block

Order = Literal["retrieved", "ascending"]


class BlockKVPostprocessor(BaseNodePostprocessor):
    """Puts block markers around each passage in the LLM's prompt, and orders the passages.

    Put it last in ``node_postprocessors``, because other postprocessors would read the markers.
    Nodes that were not ingested are marked too, and computed for the first answer. Returned nodes
    are copies.

    Example::

        index.as_query_engine(llm=llm, node_postprocessors=[BlockKVPostprocessor()])
    """

    order: Order = Field(
        default="retrieved",
        description=(
            "'retrieved' keeps the order. 'ascending' puts the best node last, next to the "
            "question. Nodes without a score come first."
        ),
    )

    def __init__(self, order: Order = "retrieved", **kwargs: Any) -> None:
        check_known(type(self), kwargs, type(self).model_fields)
        super().__init__(**{"order": order, **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "BlockKVPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if self.order == "ascending":
            nodes = sorted(nodes, key=lambda n: (n.score is not None, n.score or 0.0))
        return [n.model_copy(update={"node": as_block_node(n.node)}) for n in nodes]


class BlockKVPrefetch(BaseNodePostprocessor):
    """Prefetches retrieved passages from the KV store, and returns the nodes unchanged.

    Put it before rerankers and other slow ``node_postprocessors``. It reads in the background and
    raises no errors (see ``engine.prefetch``). It does nothing until the model is loaded, or if the
    LLM has ``mode="full"``.

    Args:
        llm: LLM that generates the answer.

    Example::

        index.as_query_engine(
            llm=llm,
            node_postprocessors=[BlockKVPrefetch(llm=llm), reranker, BlockKVPostprocessor()],
        )
    """

    _llm: BlockAttentionLLM = PrivateAttr()

    def __init__(self, llm: BlockAttentionLLM, **kwargs: Any) -> None:
        check_known(type(self), kwargs, type(self).model_fields)
        super().__init__(**kwargs)
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        return "BlockKVPrefetch"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if self._llm.mode == "block":
            texts = [canonical_text(node.node) for node in nodes]
            blocks = [Block(text, self._llm.block_template) for text in texts if text]
            self._llm.source.prefetch(blocks)
        return nodes
