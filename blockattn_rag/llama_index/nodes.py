"""Nodes as blocks. Only a node's *LLM view*, ``get_content(MetadataMode.LLM)``, contains markers.
Synthesizers read this view. Source nodes, rerankers and evaluators receive clean text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Literal

from llama_index.core.base.llms.types import BaseContentBlock, TextBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle

from blockattn_rag.adapters.arguments import check_known
from blockattn_rag.adapters.handles import HANDLE_KEY
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.prompts.markers import wrap

Order = Literal["retrieved", "ascending"]


class BlockNode(BaseNode):
    """Node whose LLM view has markers, which are created on each read. See ``as_block_node``."""

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
        # The class is created dynamically, so pickle cannot find it by name.
        return as_block_node, (as_plain_node(self), self.block_label)


@cache
def _view_class(cls: type[BaseNode]) -> type[BlockNode]:
    """Create a subclass of ``cls`` with the views of ``BlockNode``."""
    namespace = {"__module__": __name__, "plain_class": cls}
    return type(f"Block{cls.__name__}", (BlockNode, cls), namespace)


def as_block_node(node: BaseNode, label: str = "") -> BlockNode:
    """Copy ``node`` as a ``BlockNode``, whose LLM view is ``label`` and then the marked text."""
    view = _without_handle_in_views(node)
    # Changing the class preserves all fields and private state.
    object.__setattr__(view, "__class__", _view_class(type(view)))
    view.__dict__["block_label"] = label
    assert isinstance(view, BlockNode)
    return view


def as_plain_node(node: BaseNode) -> BaseNode:
    """Return ``node``, or a copy without block markers if it is a ``BlockNode``."""
    if not isinstance(node, BlockNode):
        return node
    plain = node.model_copy()
    object.__setattr__(plain, "__class__", node.plain_class)
    del plain.__dict__["block_label"]
    return plain


def canonical_text(node: BaseNode) -> str:
    """Return the text that a node's handle is computed from: its stripped LLM view."""
    return _without_handle_in_views(node).get_content(metadata_mode=MetadataMode.LLM).strip()


def stamp(node: BaseNode, text: str) -> BaseNode:
    """Copy ``node``, and add the handle of ``text`` (its canonical text) to the metadata."""
    stamped = _without_handle_in_views(node)
    stamped.metadata[HANDLE_KEY] = handle_of(text)
    return stamped


def _without_handle_in_views(node: BaseNode) -> BaseNode:
    """Copy ``node`` without markers, and exclude the handle from all text views."""
    node = as_plain_node(node)
    views = ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
    hidden = {name: list(dict.fromkeys([*getattr(node, name), HANDLE_KEY])) for name in views}
    return node.model_copy(update={**hidden, "metadata": dict(node.metadata)})


class BlockKVPostprocessor(BaseNodePostprocessor):
    """Postprocessor that puts block markers around passages in the LLM's prompt, and orders them.

    Put it last in ``node_postprocessors``. Nodes that were not ingested are marked, too, and are
    encoded when they are first used in a prompt. Returned nodes are copies.

    Example::

        index.as_query_engine(llm=llm, node_postprocessors=[BlockKVPostprocessor()])
    """

    order: Order = Field(
        default="retrieved",
        description=(
            "'retrieved' keeps the order. 'ascending' puts the best node last, next to the "
            "question. Nodes without a score come first."
        ),
    )

    def __init__(self, order: Order = "retrieved", **kwargs: Any) -> None:
        check_known(type(self), kwargs, type(self).model_fields)
        super().__init__(**{"order": order, **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "BlockKVPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if self.order == "ascending":
            nodes = sorted(nodes, key=lambda n: (n.score is not None, n.score or 0.0))
        return [n.model_copy(update={"node": as_block_node(n.node)}) for n in nodes]
