"""Query engines and synthesizers that keep blocks complete."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.indices.base import BaseIndex
from llama_index.core.llms.llm import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.query_engine.citation_query_engine import (
    CITATION_QA_TEMPLATE,
    CITATION_REFINE_TEMPLATE,
)
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    ResponseMode,
    get_response_synthesizer,
)
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText
from llama_index.core.schema import NodeWithScore

from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.nodes import (
    BlockKVPostprocessor,
    Order,
    as_block_node,
    canonical_text,
)
from blockattn_rag.llama_index.packing import BlockLLM, BlockPromptHelper
from blockattn_rag.prompts.markers import strip_markers, wrap


def configure(llm: LLM) -> None:
    """Set the LLM as LlamaIndex's default, with a matching prompt helper and tokenizer.

    Chat engines take their prompt helper from ``Settings``. Without this call, they cut passages
    that do not fit in the context window. Raises the TypeError of ``BlockPromptHelper.from_llm``.
    """
    Settings.prompt_helper = BlockPromptHelper.from_llm(llm)
    Settings.llm = llm
    Settings.tokenizer = llm.tokenize  # type: ignore[attr-defined]


def encode_prompt_head(
    llm: BlockAttentionLLM, prompt: BasePromptTemplate = DEFAULT_TEXT_QA_PROMPT_SEL
) -> None:
    """Encode and store the text before the passages in a prompt template.

    Answers store passages, but not text of user messages, so without this call, each process would
    prefill that text once. If the template puts the question first, nothing is stored.

    Args:
        prompt: Template with ``context_str`` and ``query_str``. Default: LlamaIndex's
            question-answering template.
    """
    query = "\u241equery\u241e"
    head = llm.filled(prompt, context_str=wrap("passage"), query_str=query).context[:1]
    if head and not head[0].is_passage and query not in head[0].text:
        llm.engine.precompute(head, as_prompt=True)


def block_response_synthesizer(
    llm: LLM, response_mode: ResponseMode | str = ResponseMode.COMPACT, **kwargs: Any
) -> BaseSynthesizer:
    """Create a response synthesizer that keeps blocks complete.

    The arguments are those of LlamaIndex's ``get_response_synthesizer``.
    """
    mode = ResponseMode(response_mode)
    if mode in (ResponseMode.CONTEXT_ONLY, ResponseMode.NO_TEXT):
        # LlamaIndex would create these synthesizers with the default LLM instead of this one.
        shared = ("callback_manager", "streaming", "multimodal")
        own = {name: kwargs[name] for name in shared if name in kwargs}
        return (_CleanContext if mode is ResponseMode.CONTEXT_ONLY else NoText)(llm=llm, **own)
    kwargs.setdefault("prompt_helper", BlockPromptHelper.from_llm(llm))
    return get_response_synthesizer(llm=llm, response_mode=mode, **kwargs)


class _CleanContext(ContextOnly):
    """Synthesizer for ``context_only`` that returns the context without block markers."""

    def get_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> str:
        return "\n\n".join(strip_markers(text) for text in text_chunks)

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> str:
        return self.get_response(query_str, text_chunks, **kwargs)


_SYNTHESIS = signature(get_response_synthesizer).parameters.keys() - {"callback_manager"}
"""Arguments for the synthesizer, not for ``as_query_engine``."""


def block_query_engine(
    index: BaseIndex[Any],
    llm: LLM,
    *,
    order: Order = "retrieved",
    node_postprocessors: Sequence[BaseNodePostprocessor] = (),
    response_mode: ResponseMode | str = ResponseMode.COMPACT,
    streaming: bool = False,
    **kwargs: Any,
) -> BaseQueryEngine:
    """Create a query engine that reuses passages, like ``index.as_query_engine``.

    Args:
        index: Index to query.
        llm: LLM that generates the answers.
        order: Order of the passages; see ``BlockKVPostprocessor``.
        node_postprocessors: Additional postprocessors, which run before ``BlockKVPostprocessor``.
        response_mode: Mode of the synthesizer.
        streaming: Whether to stream answers.
        kwargs: Additional arguments of ``as_query_engine``, such as ``similarity_top_k``.
    """
    # LlamaIndex does not pass these arguments to an existing synthesizer.
    own = {name: kwargs.pop(name) for name in _SYNTHESIS & kwargs.keys()}
    synthesizer = block_response_synthesizer(llm, response_mode, streaming=streaming, **own)
    return index.as_query_engine(
        llm=llm,
        response_synthesizer=synthesizer,
        node_postprocessors=[*node_postprocessors, BlockKVPostprocessor(order)],
        streaming=streaming,
        **kwargs,
    )


class BlockCitationQueryEngine(CitationQueryEngine):
    """``CitationQueryEngine`` that reuses passages.

    Each retrieved node is one source and one stored block, with its label (``Source 1:``) outside
    of the block. ``citation_chunk_size`` and ``metadata_mode`` are ignored: the text of a source is
    the content in ``MetadataMode.LLM``. With ``multimodal=True``, passages are not reused.
    """

    @classmethod
    def from_args(  # type: ignore[override]
        cls, index: Any, llm: LLM | None = None, **kwargs: Any
    ) -> CitationQueryEngine:
        """Like ``CitationQueryEngine.from_args``, with a synthesizer that keeps blocks complete."""
        keeps_blocks: bool = isinstance(llm, BlockLLM)
        if llm is not None and keeps_blocks and not kwargs.get("multimodal"):
            synthesizer = block_response_synthesizer(
                llm,
                kwargs.get("response_mode", ResponseMode.COMPACT),
                use_async=kwargs.get("use_async", False),
                streaming=kwargs.get("streaming", False),
                text_qa_template=kwargs.get("citation_qa_template", CITATION_QA_TEMPLATE),
                refine_template=kwargs.get("citation_refine_template", CITATION_REFINE_TEMPLATE),
            )
            kwargs.setdefault("response_synthesizer", synthesizer)
        return super().from_args(index, llm, **kwargs)

    def _create_citation_nodes(self, nodes: list[NodeWithScore]) -> list[NodeWithScore]:
        if self._multimodal:
            return super()._create_citation_nodes(nodes)
        with_text = [n for n in nodes if canonical_text(n.node)]
        return [
            n.model_copy(update={"node": as_block_node(n.node, label=f"Source {number}:\n")})
            for number, n in enumerate(with_text, start=1)
        ]
