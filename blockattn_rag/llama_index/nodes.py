"""Nodes as blocks: their canonical text, their handle, and the view that carries the markers.

Synthesizers read a node through ``get_content(MetadataMode.LLM)`` and nothing else. The markers are
put into that view alone, so that source nodes, rerankers and evaluators see clean text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, MetadataMode

from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.prompts.markers import wrap


class BlockNode(BaseNode):
    """A node whose LLM view stands between block markers. Made by ``as_block_node``.

    The view is computed when it is read: a later change of the text gives a new digest, so a
    marker never vouches for text that it was not made from.
    """

    plain_class: ClassVar[type[BaseNode]]
    block_label: str = Field(
        default="", exclude=True, description="Text before the markers, such as 'Source 1:'."
    )

    def get_content(self, metadata_mode: MetadataMode = MetadataMode.NONE) -> str:
        content = super().get_content(metadata_mode)  # type: ignore[safe-super]
        if metadata_mode == MetadataMode.LLM:
            content = wrap(content)
        return self.block_label + content

    def get_content_blocks(
        self, metadata_mode: MetadataMode = MetadataMode.NONE
    ) -> list[BaseContentBlock]:
        blocks: Sequence[Any] = super().get_content_blocks(metadata_mode)  # type: ignore[safe-super]
        if metadata_mode != MetadataMode.LLM:
            return list(blocks)
        marked = self.get_content(metadata_mode)
        text = [TextBlock(text=marked)] if marked else []
        return [*text, *(block for block in blocks if not isinstance(block, TextBlock))]

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time and has no name to be pickled by.
        return as_block_node, (as_plain_node(self), self.block_label)


@cache
def _view_class(cls: type[BaseNode]) -> type[BlockNode]:
    """``cls`` with ``BlockNode``'s views; all else, its class name included, stays."""
    namespace = {"__module__": __name__, "plain_class": cls}
    return type(f"Block{cls.__name__}", (BlockNode, cls), namespace)


def as_block_node(node: BaseNode, label: str = "") -> BlockNode:
    """A copy of ``node`` that shows the LLM its text between markers, after ``label``."""
    view = without_handle_in_views(as_plain_node(node))
    # Same fields and private state, other views: only the class differs.
    object.__setattr__(view, "__class__", _view_class(type(view)))
    view.__dict__["block_label"] = label
    assert isinstance(view, BlockNode)
    return view


def as_plain_node(node: BaseNode) -> BaseNode:
    """``node`` itself, or, for a ``BlockNode``, a copy without the markers."""
    if not isinstance(node, BlockNode):
        return node
    plain = node.model_copy()
    object.__setattr__(plain, "__class__", node.plain_class)
    del plain.__dict__["block_label"]
    return plain


def canonical_text(node: BaseNode) -> str:
    """The text that a node's handle names: its LLM view, stripped. Empty for non-text nodes."""
    view = without_handle_in_views(as_plain_node(node))
    return view.get_content(metadata_mode=MetadataMode.LLM).strip()


def stamp(node: BaseNode, text: str) -> BaseNode:
    """A copy of ``node`` whose metadata holds the handle of ``text``, its canonical text."""
    stamped = without_handle_in_views(node)
    stamped.metadata[HANDLE_KEY] = handle_of(text)
    return stamped


def without_handle_in_views(node: BaseNode) -> BaseNode:
    """A copy of ``node``, free to be changed, that keeps the handle out of the text views."""
    views = ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
    hidden = {name: list(dict.fromkeys([*getattr(node, name), HANDLE_KEY])) for name in views}
    return node.model_copy(update={**hidden, "metadata": dict(node.metadata)})
