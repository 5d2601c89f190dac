"""Nodes as blocks: their canonical text, their handle, and their view with markers.

Synthesizers read a node through ``get_content(MetadataMode.LLM)``. Only that view has markers, so
source nodes, rerankers and evaluators read clean text.
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
    """A node whose LLM view is between block markers. ``as_block_node`` makes it.

    The view is computed when it is read, so its markers always match its text.
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
        # The class is created at run time, so pickle cannot find it by name.
        return as_block_node, (as_plain_node(self), self.block_label)


@cache
def _view_class(cls: type[BaseNode]) -> type[BlockNode]:
    """``cls`` with the views of ``BlockNode``."""
    namespace = {"__module__": __name__, "plain_class": cls}
    return type(f"Block{cls.__name__}", (BlockNode, cls), namespace)


def as_block_node(node: BaseNode, label: str = "") -> BlockNode:
    """A copy of ``node`` whose LLM view is ``label`` and the text between markers."""
    view = without_handle_in_views(as_plain_node(node))
    # Keeps fields and private state; only the views differ.
    object.__setattr__(view, "__class__", _view_class(type(view)))
    view.__dict__["block_label"] = label
    assert isinstance(view, BlockNode)
    return view


def as_plain_node(node: BaseNode) -> BaseNode:
    """``node`` itself, or a copy without markers if it is a ``BlockNode``."""
    if not isinstance(node, BlockNode):
        return node
    plain = node.model_copy()
    object.__setattr__(plain, "__class__", node.plain_class)
    del plain.__dict__["block_label"]
    return plain


def canonical_text(node: BaseNode) -> str:
    """The text of a node's handle: its LLM view, stripped. Empty: the node has no text."""
    view = without_handle_in_views(as_plain_node(node))
    return view.get_content(metadata_mode=MetadataMode.LLM).strip()


def stamp(node: BaseNode, text: str) -> BaseNode:
    """A copy of ``node`` with the handle of ``text``, its canonical text, in its metadata."""
    stamped = without_handle_in_views(node)
    stamped.metadata[HANDLE_KEY] = handle_of(text)
    return stamped


def without_handle_in_views(node: BaseNode) -> BaseNode:
    """A copy of ``node``, metadata included, whose text views exclude the handle."""
    views = ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
    hidden = {name: list(dict.fromkeys([*getattr(node, name), HANDLE_KEY])) for name in views}
    return node.model_copy(update={**hidden, "metadata": dict(node.metadata)})
