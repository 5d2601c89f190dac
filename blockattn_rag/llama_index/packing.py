"""Text splitter and prompt helper that pack complete blocks into the context window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.node_parser import TokenTextSplitter
from llama_index.core.prompts import BasePromptTemplate, SelectorPromptTemplate

from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.markers import MarkedSpan, parse, remove_orphans, wrap


@runtime_checkable
class BlockLLM(Protocol):
    """LLM whose prompts can be packed: a ``BlockAttentionLLM`` or ``ServedLLM``."""

    @property
    def metadata(self) -> LLMMetadata: ...

    @property
    def block_template(self) -> BlockTemplate: ...

    def tokenize(self, text: str) -> list[int]: ...

    def prompt_tokens(self, prompt: BasePromptTemplate, **variables: str) -> int: ...


class BlockTextSplitter(TokenTextSplitter):
    """Text splitter that packs marked text into chunks of complete blocks.

    Chunks of blocks do not overlap. Text directly before a block, such as a source number, stays
    with the block if both fit in a chunk. A block that is larger than a chunk is split into blocks
    that fit. The tokens of ``block_template`` are counted, too. Text without blocks is split as in
    ``TokenTextSplitter``.
    """

    _block_template: BlockTemplate = PrivateAttr()

    def __init__(
        self,
        chunk_size: int,
        chunk_overlap: int = 0,
        tokenizer: Callable[[str], list[Any]] | None = None,
        separator: str = " ",
        block_template: BlockTemplate = BLANK_LINE,
    ) -> None:
        super().__init__(chunk_size, chunk_overlap, tokenizer, separator=separator)
        self._block_template = block_template

    def _split_text(self, text: str, chunk_size: int) -> list[str]:
        if not (passages := parse(text).passages):
            return super()._split_text(remove_orphans(text), chunk_size)
        chunks: list[str] = []
        current, size = "", 0
        for piece, tokens in self._pieces(text, passages, chunk_size):
            if current.strip() and size + tokens > chunk_size:
                chunks.append(current.strip())
                current, size = "", 0
            current += piece
            size += tokens
        return [*chunks, current.strip()] if current.strip() else chunks

    def _pieces(
        self, text: str, passages: Sequence[MarkedSpan], chunk_size: int
    ) -> Iterator[tuple[str, int]]:
        """Yield indivisible texts, and their numbers of tokens without block markers."""
        position = 0
        for span in passages:
            # The last paragraph before a block may be its label.
            head, blank_line, label = text[position : span.start].rpartition("\n\n")
            yield from self._plain(head + blank_line, chunk_size)
            position = span.end
            block = text[span.start : span.end]
            tokens = self._block_tokens(span.text)
            with_label = tokens + self._count(label)
            if with_label <= chunk_size:
                yield label + block, with_label
                continue
            yield from self._plain(label, chunk_size)
            if tokens <= chunk_size:
                yield block, tokens
            else:
                yield from self._cut(span, block, chunk_size)
        yield from self._plain(text[position:], chunk_size)

    def _plain(self, text: str, chunk_size: int) -> Iterator[tuple[str, int]]:
        if text.isspace():
            yield text, 0  # The block template replaces this white space.
        elif text := remove_orphans(text):
            for part in self._split(text, chunk_size):
                yield part, self._count(part)

    def _cut(self, span: MarkedSpan, block: str, chunk_size: int) -> Iterator[tuple[str, int]]:
        """Split a block into blocks that fit. Altered text keeps its markers and stays altered."""
        opening, closing = block[: block.index("]]") + 2], block[block.rindex("[[") :]
        room = max(1, chunk_size - self._block_tokens("") - 1)
        cutter = TokenTextSplitter(room, 0, self._tokenizer, separator=self.separator)
        for part in cutter.split_text(span.text):
            if part := part.strip():
                marked = wrap(part) if span.intact else opening + part + closing
                yield marked, self._block_tokens(part)

    def _block_tokens(self, text: str) -> int:
        return self._count(self._block_template.before + text + self._block_template.after)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text)) if text else 0


class _Joined(list[str]):
    """List of chunks that ``simple_summarize``, which inserts the list into a string, joins."""

    def __str__(self) -> str:
        return "\n".join(self)


class BlockPromptHelper(PromptHelper):
    """``PromptHelper`` that keeps blocks complete in every response mode.

    Each call uses the context window and answer length of its LLM, so one helper in ``Settings``
    works for several LLMs.
    """

    block_template: BlockTemplate = Field(
        default=BLANK_LINE, description="Text that the LLM puts around each passage."
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
    def from_llm(cls, llm: Any, **kwargs: Any) -> BlockPromptHelper:
        """Create a helper with the context window, tokenizer and template of an LLM.

        Raises:
            TypeError: The LLM is neither a ``BlockAttentionLLM`` nor from ``served_llm``.
        """
        if not isinstance(llm, BlockLLM):
            raise TypeError(
                "Expected a BlockAttentionLLM, or the LLM of served_llm(url); found "
                f"{type(llm).__name__}, which does not keep blocks complete"
            )
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
        helper = PromptHelper.from_llm_metadata(
            llm.metadata, self.chunk_overlap_ratio, self.chunk_size_limit, self._tokenizer_of(llm)
        )
        if not isinstance(llm, BlockLLM) or tools:
            return helper._get_available_chunk_size(prompt, num_chunks, padding, llm, tools)
        if isinstance(prompt, SelectorPromptTemplate):
            prompt = prompt.select(llm=llm)
        missing = set(prompt.template_vars) - prompt.kwargs.keys()
        # Count the prompt without passages, but with the system prompt and the chat template.
        prompt_tokens = llm.prompt_tokens(prompt, **dict.fromkeys(missing, ""))
        room = helper.context_window - helper.num_output - prompt_tokens
        size = room // num_chunks - padding
        return size if self.chunk_size_limit is None else min(size, self.chunk_size_limit)

    def _tokenizer_of(self, llm: LLM | None) -> Callable[[str], list[Any]]:
        return llm.tokenize if isinstance(llm, BlockLLM) else self._token_counter.tokenizer

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
                "The question, the prompt template and the answer leave no room for passages "
                f"({1 - size} tokens too many); shorten the question, reduce max_new_tokens, or "
                "use a larger context_window"
            )
        template_of = llm if isinstance(llm, BlockLLM) else self
        return BlockTextSplitter(
            chunk_size=size,
            chunk_overlap=int(self.chunk_overlap_ratio * size),
            tokenizer=self._tokenizer_of(llm),
            separator=self.separator,
            block_template=template_of.block_template,
        )

    def truncate(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        if not text_chunks:
            return _Joined()
        splitter = self.get_text_splitter_given_prompt(
            prompt, len(text_chunks), padding, llm, tools
        )
        return _Joined(next(iter(splitter.split_text(text)), "") for text in text_chunks)
