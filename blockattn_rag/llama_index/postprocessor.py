"""The postprocessor that marks retrieved passages as blocks. It goes last."""

from __future__ import annotations

from typing import Any, Literal

from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.llama_index.nodes import as_block_node

Order = Literal["retrieved", "ascending"]


class BlockKVPostprocessor(BaseNodePostprocessor):
    """Shows the LLM each passage between block markers, and orders the passages.

    Put it last in ``node_postprocessors``: others read the LLM's view and would see the markers.
    Nodes that were never encoded are marked too; they are computed when they are first used.
    Retrieved nodes are not changed: the returned ones are copies.

    Example::

        index.as_query_engine(llm=llm, node_postprocessors=[BlockKVPostprocessor()])
    """

    order: Order = Field(
        default="retrieved",
        description=(
            "'retrieved' keeps the order; 'ascending' puts the best score last, next to the "
            "question, as in the papers. Nodes without a score come first."
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
