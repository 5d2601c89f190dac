"""The postprocessor that reads retrieved passages ahead of their prompt. It goes first."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import NodeWithScore, QueryBundle

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.nodes import canonical_text
from blockattn_rag.prompts.blocks import Block


class BlockKVPrefetch(BaseNodePostprocessor):
    """Begins to read retrieved passages from the KV store; the nodes go on as they came.

    Put it before rerankers and other slow ``node_postprocessors``, while ``BlockKVPostprocessor``
    goes last. It returns at once and raises nothing (``engine.prefetch``); passages that are
    dropped later were read in vain. Nothing is read before the model is loaded, or for an LLM with
    ``mode="full"``.

    Args:
        llm: the LLM that will answer.

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
