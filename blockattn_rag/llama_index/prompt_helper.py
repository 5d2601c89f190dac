"""The prompt helper that packs whole blocks into the context window."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, LLMMetadata, MessageRole
from llama_index.core.bridge.pydantic import Field
from llama_index.core.constants import DEFAULT_NUM_OUTPUTS
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate

from blockattn_rag.blocks import BlockTemplate
from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.splitter import BlockTextSplitter
from blockattn_rag.prompts import BLANK_LINE


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
        sized = self._for(llm) if llm is not None else self
        return PromptHelper._get_available_chunk_size(
            sized, prompt, num_chunks, padding, llm, tools
        )

    def _for(self, llm: LLM) -> PromptHelper:
        """The base helper with the window that this LLM leaves."""
        metadata: LLMMetadata = llm.metadata
        num_output = DEFAULT_NUM_OUTPUTS if metadata.num_output == -1 else metadata.num_output
        return PromptHelper(
            context_window=metadata.context_window - _format_tokens(llm),
            num_output=num_output,
            chunk_size_limit=self.chunk_size_limit,
            tokenizer=self._tokenizer_of(llm),
        )

    def _tokenizer_of(self, llm: LLM | None) -> Callable[[str], list[Any]]:
        if isinstance(llm, BlockAttentionLLM):
            return llm.tokenize
        tokenizer: Callable[[str], list[Any]] = self._token_counter.tokenizer
        return tokenizer

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
                f"the prompt template and the answer leave {size} tokens for passages; use a "
                "larger context_window or a smaller max_new_tokens"
            )
        own = llm.block_template if isinstance(llm, BlockAttentionLLM) else None
        return BlockTextSplitter(
            chunk_size=size,
            chunk_overlap=int(self.chunk_overlap_ratio * size),
            tokenizer=self._tokenizer_of(llm),
            separator=self.separator,
            block_template=own or self.block_template,
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


def _format_tokens(llm: LLM) -> int:
    """Tokens that the chat template puts around a system and a user message."""
    if not isinstance(llm, BlockAttentionLLM) or not llm.metadata.is_chat_model:
        return 0
    roles = (MessageRole.SYSTEM, MessageRole.USER)
    frame = llm.to_prompt([ChatMessage(role=role, content="x") for role in roles])
    return len(llm.tokenize(frame.text))
