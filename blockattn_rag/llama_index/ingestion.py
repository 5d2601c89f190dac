"""Ingestion of nodes: an encoding step, download-free embeddings, and adding nodes to Chroma."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llama_index.core.base.embeddings.base import BaseEmbedding, Embedding
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import (
    DEFAULT_METADATA_TMPL,
    DEFAULT_TEXT_NODE_TMPL,
    BaseNode,
    Document,
    TransformComponent,
)

from blockattn_rag.adapters.arguments import check_items, check_known
from blockattn_rag.adapters.hashed_embedding import hashed_vectors
from blockattn_rag.adapters.sources import ingestion_source
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.find_recipe import AUTO, RecipeLike
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.llama_index.nodes import canonical_text, stamp
from blockattn_rag.llama_index.source import SourceComponent
from blockattn_rag.prompts.blocks import BlockTemplate
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.store import KVStore

if TYPE_CHECKING:
    from llama_index.vector_stores.chroma import ChromaVectorStore

logger = logging.getLogger("blockattn_rag")

_LONG = 8000
"""Number of characters above which a document should be split: about two default chunks."""


class BlockKVTransform(SourceComponent, TransformComponent):
    """Ingestion step that encodes nodes as blocks, stores their KV, and adds their handles.

    Put it after all steps that change text or metadata. A node's block is its content in
    ``MetadataMode.LLM``. Stored blocks are skipped, including those of an interrupted run. Returned
    nodes are copies with ``metadata["kv_handle"]``, which is excluded from the text for the LLM and
    the embedding model. Nodes without text are returned unchanged.

    The keys of a pipeline cache include the model's fingerprint, the store and the template. The
    pipeline therefore loads the model even if all results are cached.

    Args:
        model_name, engine, kv_store, ...: See ``BlockAttentionLLM``.
        server: Address of a server that encodes the nodes into its own store, such as
            ``"http://gpu:8000"``, or a list of servers that share a store. Replaces the above.
        journal: Folder that records which server stored which passage (see ``ServerPool``).
        api_key: API key of the server, which is not pickled. Default: the environment variable
            ``BLOCKATTN_RAG_API_KEY``, which worker processes also read.
        llm: LLM whose server, or whose model, store and recipe, are used. Replaces the above.
        block_template: Text around each passage. The LLM must use the same template. Default: that
            of ``llm``, or a blank line after the passage.
        show_progress: Whether to show a progress bar.
        hide_file_paths: Whether to exclude ``file_path`` of ``SimpleDirectoryReader`` from blocks.
        metadata_key: Metadata key, such as ``"window"``, whose value replaces the text of nodes
            that have this key, as in ``MetadataReplacementPostProcessor``.

    Example::

        IngestionPipeline(transformations=[splitter, BlockKVTransform(llm=llm), embed_model])
    """

    server: str | list[str] | None = None
    journal: str | None = None
    block_template: BlockTemplate
    show_progress: bool = False
    hide_file_paths: bool = True
    metadata_key: str | None = None

    _stats: EncodeStats | None = PrivateAttr(default=None)
    _has_warned: bool = PrivateAttr(default=False)

    def __init__(
        self,
        model_name: str | None = None,
        *,
        llm: LLM | None = None,
        tokenizer_name: str | None = None,
        engine: BlockAttentionEngine | None = None,
        kv_store: KVStore | str | Path | None = None,
        recipe: RecipeLike | None = None,
        server: str | list[str] | None = None,
        api_key: str | None = None,
        journal: str | Path | None = None,
        block_template: BlockTemplate | None = None,
        model_kwargs: dict[str, Any] | None = None,
        device_map: str = "auto",
        show_progress: bool = False,
        hide_file_paths: bool = True,
        metadata_key: str | None = None,
    ) -> None:
        source = ingestion_source(
            llm,
            "BlockAttentionLLM",
            server=server,
            api_key=api_key,
            journal=journal,
            engine=engine,
            model_name=model_name,
            tokenizer_name=tokenizer_name,
            kv_store=kv_store,
            device_map=None if device_map == "auto" else device_map,
            model_kwargs=model_kwargs or None,
            recipe=None if recipe == AUTO else recipe,
        )
        fields = {
            **source.fields(),
            "block_template": block_template or getattr(llm, "block_template", BLANK_LINE),
            "show_progress": show_progress,
            "hide_file_paths": hide_file_paths,
            "metadata_key": metadata_key,
        }
        super().__init__(**fields)
        self._source = source

    @property
    def stats(self) -> EncodeStats | None:
        """Statistics of the last call, or None before the first call."""
        return self._stats

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[BaseNode]:
        check_items(nodes, BaseNode, "convert texts to nodes: [TextNode(text=text)]")
        self._check_key(nodes)
        views = [_without_file_path(node) for node in nodes] if self.hide_file_paths else nodes
        texts = [canonical_text(_shown(view, self.metadata_key)) for view in views]
        self._check_split(nodes, texts)
        encoded = [text for text in texts if text]
        self._stats = self._source.encode(
            encoded, self.block_template, show_progress=self.show_progress
        )
        return [
            stamp(view, text) if text else node
            for node, view, text in zip(nodes, views, texts, strict=True)
        ]

    def _check_key(self, nodes: Sequence[BaseNode]) -> None:
        if self.metadata_key and nodes and all(self.metadata_key not in n.metadata for n in nodes):
            keys = sorted({key for node in nodes for key in node.metadata})
            logger.warning(
                "No node has the metadata key %r, so the nodes' own texts are encoded; found %s",
                self.metadata_key,
                ", ".join(keys) or "none",
            )

    def _check_split(self, nodes: Sequence[BaseNode], texts: Sequence[str]) -> None:
        pairs = zip(nodes, texts, strict=True)
        longest = max((len(text) for node, text in pairs if isinstance(node, Document)), default=0)
        if not self._has_warned and longest > _LONG:
            self._has_warned = True
            logger.warning(
                "Found an unsplit document of %d characters. It becomes a single passage, which "
                "is slow to retrieve and may not fit in the context window. Add a splitter: "
                "transformations=[SentenceSplitter(), BlockKVTransform(llm=llm)]",
                longest,
            )

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[BaseNode]:
        return await asyncio.to_thread(self, nodes, **kwargs)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the fields, and all other values that identify results in ``IngestionCache``."""
        return {**super().to_dict(**kwargs), **self._source.storage}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> BlockKVTransform:
        storage = ("fingerprint", "store", "namespace", "encoding")  # See ``to_dict``.
        fields = {name: value for name, value in data.items() if name not in storage}
        return super().from_dict(fields, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        if self._source.lasting_store is None:
            raise pickle.PicklingError(
                "This BlockKVTransform stores blocks in this process's memory, which other "
                "processes cannot access; pass a directory or an address as kv_store=, or run the "
                "pipeline without num_workers"
            )
        return super().__getstate__()


def _shown(node: BaseNode, metadata_key: str | None) -> BaseNode:
    if metadata_key is None or (text := node.metadata.get(metadata_key)) is None:
        return node
    if not isinstance(text, str):
        raise ValueError(
            f"Expected text in the metadata key {metadata_key!r} of node {node.node_id}, found "
            f"{text!r:.60}"
        )
    shown = node.model_copy()
    shown.set_content(text)
    return shown


def _without_file_path(node: BaseNode) -> BaseNode:
    """Return the node, or a copy whose LLM view excludes the path from ``SimpleDirectoryReader``.
    The reader also adds and hides the file name, which distinguishes the reader's path from a path
    that the user added. Nodes with a custom template keep the path, which the template may use."""
    path, name = node.metadata.get("file_path"), node.metadata.get("file_name")
    hidden = node.excluded_llm_metadata_keys
    is_readers = name and str(path).endswith(str(name)) and "file_name" in hidden
    defaults = {"text_template": DEFAULT_TEXT_NODE_TMPL, "metadata_template": DEFAULT_METADATA_TMPL}
    is_chosen = any(getattr(node, name, value) != value for name, value in defaults.items())
    if not is_readers or is_chosen or "file_path" in hidden:
        return node
    return node.model_copy(update={"excluded_llm_metadata_keys": [*hidden, "file_path"]})


class HashingEmbedding(BaseEmbedding):
    """Embedding model that counts hashed words and character n-grams, and needs no download. It
    matches only passages that share words with the question. Do not use it in production."""

    dimensions: int = Field(default=2048, description="Number of dimensions.", gt=0)

    def __init__(self, dimensions: int = 2048, **kwargs: Any) -> None:
        check_known(type(self), kwargs, type(self).model_fields)
        super().__init__(**{"model_name": "hashing", "dimensions": dimensions, **kwargs})

    @classmethod
    def class_name(cls) -> str:
        return "HashingEmbedding"

    def _get_text_embeddings(self, texts: list[str]) -> list[Embedding]:
        return hashed_vectors(texts, self.dimensions)

    def _get_text_embedding(self, text: str) -> Embedding:
        return self._get_text_embeddings([text])[0]

    def _get_query_embedding(self, query: str) -> Embedding:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> Embedding:
        return await asyncio.to_thread(self._get_query_embedding, query)


def add_nodes(vector_store: ChromaVectorStore, nodes: Sequence[BaseNode], client: Any) -> list[str]:
    """Add embedded nodes to a Chroma vector store in batches that ``client`` accepts.

    ``ChromaVectorStore.add`` sends up to 41665 nodes at once, which Chroma 1 rejects. Nodes whose
    id is already in the collection are skipped; to replace them, delete the stored nodes first.
    Returns the ids of all nodes.
    """
    size = client.get_max_batch_size()
    batches = (list(nodes[at : at + size]) for at in range(0, len(nodes), size))
    return [node_id for batch in batches for node_id in vector_store.add(batch)]
