"""Answers with numbered sources, each source one whole block."""

from __future__ import annotations

from typing import Any

from llama_index.core.llms.llm import LLM
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.query_engine.citation_query_engine import (
    CITATION_QA_TEMPLATE,
    CITATION_REFINE_TEMPLATE,
)
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.schema import NodeWithScore

from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.nodes import as_block_node, canonical_text
from blockattn_rag.llama_index.synthesis import block_response_synthesizer


class BlockCitationQueryEngine(CitationQueryEngine):
    """``CitationQueryEngine`` that reuses passages.

    Each retrieved node is one source: it is not cut to ``citation_chunk_size``, and its label
    (``Source 1:``) stands outside its block, so that the block is the one that was stored. The
    source shows the LLM's view of the node, metadata included, whatever ``metadata_mode`` says.
    With ``multimodal=True`` it does as its parent does, without reuse.
    """

    @classmethod
    def from_args(  # type: ignore[override]
        cls,
        index: Any,
        llm: LLM | None = None,
        *,
        response_mode: ResponseMode = ResponseMode.COMPACT,
        use_async: bool = False,
        streaming: bool = False,
        citation_qa_template: Any = CITATION_QA_TEMPLATE,
        citation_refine_template: Any = CITATION_REFINE_TEMPLATE,
        multimodal: bool = False,
        **kwargs: Any,
    ) -> CitationQueryEngine:
        """As the parent's; a ``BlockAttentionLLM`` gets a synthesizer that keeps blocks whole."""
        ways: dict[str, Any] = {"use_async": use_async, "streaming": streaming}
        if isinstance(llm, BlockAttentionLLM) and not multimodal:
            templates = {
                "text_qa_template": citation_qa_template,
                "refine_template": citation_refine_template,
            }
            synthesizer = block_response_synthesizer(llm, response_mode, **ways, **templates)
            kwargs.setdefault("response_synthesizer", synthesizer)
        return super().from_args(
            index,
            llm,
            response_mode=response_mode,
            **ways,
            citation_qa_template=citation_qa_template,
            citation_refine_template=citation_refine_template,
            multimodal=multimodal,
            **kwargs,
        )

    def _create_citation_nodes(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        if self._multimodal:
            return super()._create_citation_nodes(nodes)
        with_text = [n for n in nodes if canonical_text(n.node)]
        return [
            n.model_copy(update={"node": as_block_node(n.node, label=f"Source {number}:\n")})
            for number, n in enumerate(with_text, start=1)
        ]
