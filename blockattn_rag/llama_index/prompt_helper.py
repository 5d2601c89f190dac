"""The prompt helper that packs whole blocks into the context window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate

from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.splitter import BlockTextSplitter
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE


class _Joined(list[str]):
    """Chunks that print as text: ``simple_summarize`` puts the list itself into the prompt."""

    def __str__(self) -> str:
        return "\n".join(self)


class BlockPromptHelper(PromptHelper):
    """A ``PromptHelper`` that keeps blocks whole in every response mode.

    Windows and answer lengths are those of the LLM that is asked, so that one helper in
    ``Settings`` serves several LLMs. For a ``BlockAttentionLLM``, tokens are counted by its own
    tokenizer and room is kept for its chat template.
    """

    block_template: BlockTemplate = Field(
        default=BLANK_LINE, description="What the LLM puts around each passage."
    )

    def __init__(
        self, *args: Any, block_template: BlockTemplate = BLANK_LINE, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.block_template = block_template

    @classmethod
    def class_name(cls) -> str:
        return "BlockPromptHelper"

    @classmethod
    def from_llm(cls, llm: BlockAttentionLLM, **kwargs: Any) -> BlockPromptHelper:
        """A helper for this LLM: its window, its tokenizer, its template."""
        return cls(
            context_window=llm.metadata.context_window,
            num_output=llm.metadata.num_output,
            tokenizer=llm.tokenize,
            block_template=llm.block_template,
            **kwargs,
        )

    def _get_available_chunk_size(
        self,
        prompt: BasePromptTemplate,
        num_chunks: int = 1,
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> int:
        if llm is None:
            return super()._get_available_chunk_size(prompt, num_chunks, padding, llm, tools)
        window, num_output = llm.metadata.context_window, llm.metadata.num_output
        num_output = DEFAULT_NUM_OUTPUTS if num_output == -1 else num_output
        if not isinstance(llm, BlockAttentionLLM) or tools:
            other = PromptHelper(
                window, num_output, self.chunk_overlap_ratio, self.chunk_size_limit,
                self._tokenizer_of(llm),
            )  # fmt: skip
            return other._get_available_chunk_size(prompt, num_chunks, padding, llm, tools)
        room = window - num_output - _empty_prompt_tokens(prompt, llm)
        size = room // num_chunks - padding
        return size if self.chunk_size_limit is None else min(size, self.chunk_size_limit)

    def _tokenizer_of(self, llm: LLM | None) -> Callable[[str], list[Any]]:
        return llm.tokenize if isinstance(llm, BlockAttentionLLM) else self._token_counter.tokenizer

    def get_text_splitter_given_prompt(
        self,
        prompt: BasePromptTemplate,
        num_chunks: int = 1,
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> BlockTextSplitter:
        size = self._get_available_chunk_size(prompt, num_chunks, padding, llm, tools)
        if size <= 0:
            raise ValueError(
                f"the question, the prompt template and the answer leave no room for passages "
                f"({1 - size} tokens too many); shorten the question or max_new_tokens, or "
                "use a larger context_window"
            )
        asked = llm if isinstance(llm, BlockAttentionLLM) else self
        return BlockTextSplitter(
            chunk_size=size,
            chunk_overlap=int(self.chunk_overlap_ratio * size),
            tokenizer=self._tokenizer_of(llm),
            separator=self.separator,
            block_template=asked.block_template,
        )

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        """The first chunk of each text that fits; whole blocks only."""
        if not text_chunks:
            return _Joined()
        splitter = self.get_text_splitter_given_prompt(
            prompt, len(text_chunks), padding, llm, tools
        )
        return _Joined(next(iter(splitter.split_text(text)), "") for text in text_chunks)


def _empty_prompt_tokens(prompt: BasePromptTemplate, llm: BlockAttentionLLM) -> int:
    """Tokens of the prompt without its passages, system prompt and chat template included."""
    if isinstance(prompt, SelectorPromptTemplate):
        prompt = prompt.select(llm=llm)
    missing = set(prompt.template_vars) - prompt.kwargs.keys()
    empty = llm.filled(prompt, **dict.fromkeys(missing, ""))
    return len(llm.source.tokenizer.prompt_ids(empty).flat)
