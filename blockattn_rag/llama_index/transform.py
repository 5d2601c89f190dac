"""The ingestion step that computes and stores the keys and values of every passage."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.schema import (
    DEFAULT_METADATA_TMPL,
    DEFAULT_TEXT_NODE_TMPL,
    BaseNode,
    TransformComponent,
)

from blockattn_rag.adapters.arguments import check_items
from blockattn_rag.adapters.engine_source import EngineSource, source_of
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.llama_index.llm import BlockAttentionLLM
from blockattn_rag.llama_index.nodes import canonical_text, stamp
from blockattn_rag.llama_index.source import EngineComponent
from blockattn_rag.prompts.blocks import Block, BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import KVStore

logger = logging.getLogger("blockattn_rag")

_NO_FIELDS = ("fingerprint", "store", "namespace", "encoding")
"""What ``to_dict`` tells besides the fields."""


class BlockKVTransform(EngineComponent, TransformComponent):
    """Encodes nodes as blocks, stores their keys and values, and stamps their handles.

    Put it after every step that changes text or metadata; the embedding model may come before or
    after. A node's block is its text as the LLM will see it, which is not always the one that is
    embedded. What is stored already is skipped, and every batch is stored as it is done: a run that
    was interrupted goes on where it stopped. Returned nodes are copies with
    ``metadata["kv_handle"]``, hidden from the LLM's and the embedder's view; nodes without text
    pass through.

    The first ingestion with a pipeline cache reads the model's weights once for its fingerprint,
    which makes cached results of another model, store or template invalid.

    Args:
        model_name, tokenizer_name, engine, kv_store, recipe: as ``BlockAttentionLLM``.
        api_base, api_key, model_kwargs, device_map: as ``BlockAttentionLLM``.
        llm: takes model, store, template and recipe from this LLM; instead of the above.
        block_template: what stands around each passage; must be that of the LLM.
        show_progress: show a progress bar.
        hide_file_paths: False leaves the reader's paths in the blocks.
        metadata_key: where the text stands that the LLM is shown in place of a node's own, such as
            ``"window"`` for ``SentenceWindowNodeParser``; that of
            ``MetadataReplacementPostProcessor``. Nodes without it are shown as they are.

    Example::

        IngestionPipeline(transformations=[splitter, BlockKVTransform(llm=llm), embed_model])
    """

    block_template: BlockTemplate = Field(description="What stands around each passage.")
    show_progress: bool = Field(default=False, description="Show a progress bar.")
    hide_file_paths: bool = Field(
        default=True, description="Keep SimpleDirectoryReader's file_path out of the blocks."
    )
    metadata_key: str | None = Field(
        default=None, description="Metadata key of the text that is shown in a node's place."
    )

    _stats: EncodeStats | None = PrivateAttr(default=None)

    def __init__(
        self,
        model_name: str | None = None,
        *,
        llm: BlockAttentionLLM | None = None,
        tokenizer_name: str | None = None,
        engine: Engine | None = None,
        kv_store: KVStore | str | Path | None = None,
        recipe: RecipeLike | None = None,
        api_base: str | None = None,
        api_key: str | None = None,
        block_template: BlockTemplate | None = None,
        model_kwargs: dict[str, Any] | None = None,
        device_map: str = "auto",
        show_progress: bool = False,
        hide_file_paths: bool = True,
        metadata_key: str | None = None,
    ) -> None:
        if llm is not None:
            given = (model_name, tokenizer_name, engine, kv_store, recipe, model_kwargs)
            if any(value is not None for value in (*given, api_base, api_key)):
                raise ValueError("give either llm=, or the model, store and recipe, not both")
            source = source_of(llm, "BlockAttentionLLM")
            block_template = block_template or llm.block_template
        else:
            loading = (engine, model_name, tokenizer_name, kv_store, device_map, model_kwargs)
            source = EngineSource(*loading, api_base, api_key, recipe or AUTO)
        fields = {**source.fields(), "block_template": block_template or BLANK_LINE}
        fields |= {"show_progress": show_progress, "hide_file_paths": hide_file_paths}
        fields["metadata_key"] = metadata_key
        super().__init__(**fields)
        self._source = source

    @classmethod
    def class_name(cls) -> str:
        return "BlockKVTransform"

    @property
    def stats(self) -> EncodeStats | None:
        """What the last call computed and reused; None before the first."""
        return self._stats

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[BaseNode]:
        check_items(nodes, BaseNode, "make nodes of texts: [TextNode(text=text)]")
        self._check_key(nodes)
        views = [_without_file_path(node) for node in nodes] if self.hide_file_paths else nodes
        texts = [canonical_text(_shown(view, self.metadata_key)) for view in views]
        blocks = [Block(text, self.block_template) for text in texts if text]
        self._stats = self.engine.precompute(blocks, show_progress=self.show_progress)
        return [
            stamp(view, text) if text else node
            for node, view, text in zip(nodes, views, texts, strict=True)
        ]

    def _check_key(self, nodes: Sequence[BaseNode]) -> None:
        """Warn where no node has the text that the LLM is to be shown, as with a misspelt key."""
        if self.metadata_key and nodes and all(self.metadata_key not in n.metadata for n in nodes):
            found = sorted({key for node in nodes for key in node.metadata})
            logger.warning(
                "no node has the metadata %r, so the nodes' own texts are encoded; found %s",
                self.metadata_key,
                ", ".join(found) or "none",
            )

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[BaseNode]:
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """The fields, and what else makes a cached ingestion valid: ``IngestionCache`` reads it."""
        return {
            **super().to_dict(**kwargs),
            "fingerprint": self.engine.model.fingerprint,
            **self.source.storage,
            "encoding": list(self.engine.recipe.encoding),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> BlockKVTransform:
        fields = {k: v for k, v in data.items() if k not in _NO_FIELDS}
        return super().from_dict(fields, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if self.source.lasting_store is None:
            raise pickle.PicklingError(
                "this BlockKVTransform stores in memory, where another process could not leave "
                "anything; give kv_store= a directory or an address, or run the pipeline without "
                "num_workers"
            )
        return super().__getstate__()


def _shown(node: BaseNode, metadata_key: str | None) -> BaseNode:
    """The node with the text that the LLM is shown in place of its own, if its metadata has one."""
    if metadata_key is None or (text := node.metadata.get(metadata_key)) is None:
        return node
    if not isinstance(text, str):
        raise ValueError(
            f"expected text in the metadata {metadata_key!r} of node {node.node_id}, found "
            f"{text!r:.60}"
        )
    shown = node.model_copy()
    shown.set_content(text)
    return shown


def _without_file_path(node: BaseNode) -> BaseNode:
    """The node, or a copy whose LLM view lacks the path that ``SimpleDirectoryReader`` gave it.

    The reader's path is told from a user's by what stands beside it: the file's name, which the
    reader hides. Whoever wrote a template chose what the LLM sees of the metadata.
    """
    path, name = node.metadata.get("file_path"), node.metadata.get("file_name")
    hidden = node.excluded_llm_metadata_keys
    is_readers = name and str(path).endswith(str(name)) and "file_name" in hidden
    defaults = {"text_template": DEFAULT_TEXT_NODE_TMPL, "metadata_template": DEFAULT_METADATA_TMPL}
    is_chosen = any(getattr(node, name, value) != value for name, value in defaults.items())
    if not is_readers or is_chosen or "file_path" in hidden:
        return node
    return node.model_copy(update={"excluded_llm_metadata_keys": [*hidden, "file_path"]})
