"""A text splitter that never cuts a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.node_parser import TokenTextSplitter

from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.marked_text import remove_orphans
from blockattn_rag.prompts.markers import MarkedSpan, parse, wrap


class _Piece(NamedTuple):
    """Text that stays in one piece, and its tokens in the prompt, markers not counted."""

    text: str
    tokens: int


class BlockTextSplitter(TokenTextSplitter):
    """Packs marked text into chunks of whole blocks; text without markers is split as usual.

    Chunks of blocks do not overlap. Text just before a block, such as a source's number, stays
    with it. A block that is larger than a chunk is cut into blocks that fit.

    Args:
        tokenizer: token ids of a text, by the model's tokenizer for exact sizes.
        block_template: what the LLM puts around each passage; it counts too.
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

    @classmethod
    def class_name(cls) -> str:
        return "BlockTextSplitter"

    def _split_text(self, text: str, chunk_size: int) -> list[str]:
        if not (passages := parse(text).passages):
            return super()._split_text(remove_orphans(text), chunk_size)
        chunks: list[str] = []
        current, size = "", 0
        for piece in self._pieces(text, passages, chunk_size):
            if current.strip() and size + piece.tokens > chunk_size:
                chunks.append(current.strip())
                current, size = "", 0
            current += piece.text
            size += piece.tokens
        return [*chunks, current.strip()] if current.strip() else chunks

    def _pieces(
        self, text: str, passages: Sequence[MarkedSpan], chunk_size: int
    ) -> Iterator[_Piece]:
        position = 0
        for span in passages:
            # The last paragraph before a block belongs to it; what precedes may be cut.
            head, blank_line, label = text[position : span.start].rpartition("\n\n")
            yield from self._plain(head + blank_line, chunk_size)
            position = span.end
            block = text[span.start : span.end]
            tokens = self._block_tokens(span.text)
            with_label = tokens + self._count(label)
            if with_label <= chunk_size:
                yield _Piece(label + block, with_label)
                continue
            yield from self._plain(label, chunk_size)
            if tokens <= chunk_size:
                yield _Piece(block, tokens)
            else:
                yield from self._cut(span, block, chunk_size)
        yield from self._plain(text[position:], chunk_size)

    def _plain(self, text: str, chunk_size: int) -> Iterator[_Piece]:
        if text.isspace():
            yield _Piece(text, 0)  # the blocks' template takes its place
        elif text := remove_orphans(text):
            for part in self._split(text, chunk_size):
                yield _Piece(part, self._count(part))

    def _cut(self, span: MarkedSpan, block: str, chunk_size: int) -> Iterator[_Piece]:
        """Blocks that fit, from one that does not. Pieces of a text that was changed after it was
        marked keep its markers, because these show the change."""
        opening, closing = block[: block.index("]]") + 2], block[block.rindex("[[") :]
        room = max(1, chunk_size - self._block_tokens("") - 1)
        cutter = TokenTextSplitter(room, 0, self._tokenizer, separator=self.separator)
        for part in cutter.split_text(span.text):
            if part := part.strip():
                marked = wrap(part) if span.intact else opening + part + closing
                yield _Piece(marked, self._block_tokens(part))

    def _block_tokens(self, text: str) -> int:
        return self._count(self._block_template.before + text + self._block_template.after)

    def _count(self, text: str) -> int:
        return len(self._tokenizer(text)) if text else 0
