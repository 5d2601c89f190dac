"""Shortcuts that put the pieces in the places where LlamaIndex looks for them."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

from llama_index.core import Settings
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.indices.base import BaseIndex
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.response_synthesizers import (
    BaseSynthesizer,
    ResponseMode,
    get_response_synthesizer,
)
from llama_index.core.response_synthesizers.context_only import ContextOnly
from llama_index.core.response_synthesizers.no_text import NoText

from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.postprocessor import BlockKVPostprocessor, Order
from blockattn_rag.llama_index.prefetch import BlockKVPrefetch
from blockattn_rag.llama_index.prompt_helper import BlockPromptHelper
from blockattn_rag.prompts.markers import strip_markers, wrap


def configure(llm: BlockAttentionLLM) -> None:
    """Make ``llm`` the default of LlamaIndex: its LLM, prompt helper and token counting.

    Chat engines take their prompt helper from ``Settings`` alone, so that long contexts keep
    their blocks whole there only after this call.
    """
    Settings.llm = llm
    Settings.prompt_helper = BlockPromptHelper.from_llm(llm)
    Settings.tokenizer = llm.tokenize


def encode_prompt_head(
    llm: BlockAttentionLLM, prompt: BasePromptTemplate = DEFAULT_TEXT_QA_PROMPT_SEL
) -> None:
    """Store what stands before the passages in every prompt made of a template.

    Questions store passages, and never what stands in a user's message beside them. So the words of
    the template are computed by the first question of each process, unless they were stored on
    purpose: this does it, once.

    A template that shows the question first has no such head: nothing is stored then.

    Args:
        llm: the model that will be asked.
        prompt: with ``context_str`` and ``query_str``; default: LlamaIndex's own for questions.
    """
    query = "\u241equery\u241e"
    head = llm.filled(prompt, context_str=wrap("passage"), query_str=query).context[:1]
    if head and not head[0].is_passage and query not in head[0].text:
        llm.engine.precompute(head, as_prompt=True)


def block_response_synthesizer(
    llm: BlockAttentionLLM, response_mode: ResponseMode | str = ResponseMode.COMPACT, **kwargs: Any
) -> BaseSynthesizer:
    """LlamaIndex's ``get_response_synthesizer``, packing whole blocks; ``kwargs`` are its own."""
    mode = ResponseMode(response_mode)
    if mode in (ResponseMode.CONTEXT_ONLY, ResponseMode.NO_TEXT):
        # LlamaIndex makes these without the LLM that was given, and so asks for a default one.
        shared = ("callback_manager", "streaming", "multimodal")
        own = {name: kwargs[name] for name in shared if name in kwargs}
        return (_CleanContext if mode is ResponseMode.CONTEXT_ONLY else NoText)(llm=llm, **own)
    kwargs.setdefault("prompt_helper", BlockPromptHelper.from_llm(llm))
    return get_response_synthesizer(llm=llm, response_mode=mode, **kwargs)


class _CleanContext(ContextOnly):
    """``context_only`` shows the LLM's view to the user, who shall see no markers."""

    def get_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> str:
        return "\n\n".join(strip_markers(text) for text in text_chunks)

    async def aget_response(self, query_str: str, text_chunks: Sequence[str], **kwargs: Any) -> str:
        return self.get_response(query_str, text_chunks, **kwargs)


_SYNTHESIS = signature(get_response_synthesizer).parameters.keys() - {"callback_manager"}
"""Arguments of LlamaIndex's synthesizers that its retrievers and query engines do not take."""


def block_query_engine(
    index: BaseIndex[Any],
    llm: BlockAttentionLLM,
    *,
    order: Order = "retrieved",
    node_postprocessors: Sequence[BaseNodePostprocessor] = (),
    response_mode: ResponseMode | str = ResponseMode.COMPACT,
    streaming: bool = False,
    **kwargs: Any,
) -> BaseQueryEngine:
    """``index.as_query_engine`` with everything in place.

    Args:
        order: see ``BlockKVPostprocessor``, which goes after ``node_postprocessors``;
            ``BlockKVPrefetch`` goes before them.
        kwargs: further arguments of ``as_query_engine``, such as ``similarity_top_k`` of the
            retriever or ``output_cls`` of the synthesizer.
    """
    # LlamaIndex hands none of them on to a synthesizer that it is given.
    own = {name: kwargs.pop(name) for name in _SYNTHESIS & kwargs.keys()}
    synthesizer = block_response_synthesizer(llm, response_mode, streaming=streaming, **own)
    return index.as_query_engine(
        llm=llm,
        response_synthesizer=synthesizer,
        node_postprocessors=[
            BlockKVPrefetch(llm),
            *node_postprocessors,
            BlockKVPostprocessor(order),
        ],
        streaming=streaming,
        **kwargs,
    )
