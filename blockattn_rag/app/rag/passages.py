"""Passages of a database: texts, sources, prompts and retrieval."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blockattn_rag.llama_index as adapter
from blockattn_rag.adapters.handles import records_of
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.documents import SOURCE_KEY
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.formats import Passage
from blockattn_rag.prompts.markers import wrap

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

_PASSAGES_PER_CALL = 1_000
_SOURCES_PER_CALL = 100


def all_passages(collection: Collection) -> list[str]:
    """Return the canonical texts of a collection's passages, distinct and sorted."""
    from llama_index.core.vector_stores.utils import metadata_dict_to_node

    nodes: Iterator[BaseNode] = (
        metadata_dict_to_node(metadata, text=document)
        for metadata, document in records_of(collection, "metadatas", "documents")
    )
    return sorted({text for node in nodes if (text := adapter.canonical_text(node))})


def all_sources(collection: Collection) -> list[str]:
    records = (metadata or {} for (metadata,) in records_of(collection, "metadatas"))
    return sorted({str(metadata[SOURCE_KEY]) for metadata in records if SOURCE_KEY in metadata})


def sources_at(path: Path, sources: Sequence[str]) -> list[str]:
    """Return the sources at or below a path.

    A source's name is the resolved path of the ingested folder plus the unresolved path within it.
    A link is therefore looked up first by its own name, then by its target's.
    """
    for place in (path.parent.resolve() / path.name, path.resolve()):
        if inside := [source for source in sources if Path(source).is_relative_to(place)]:
            return inside
    return []


def orphaned_sources(collection: Collection, unread: Container[str]) -> list[str]:
    """Return sources that have passages, but whose file is missing or in ``unread``."""
    return [name for name in all_sources(collection) if name in unread or _is_gone(Path(name))]


def _is_gone(path: Path) -> bool:
    try:
        return path.is_absolute() and not path.exists()
    except OSError:  # No permission to access the path.
        return False


def ids_of(collection: Collection, sources: Sequence[str]) -> Iterator[str]:
    for at in range(0, len(sources), _SOURCES_PER_CALL):
        where: Any = {SOURCE_KEY: {"$in": list(sources[at : at + _SOURCES_PER_CALL])}}
        yield from collection.get(where=where, include=[])["ids"]


def delete_passages(collection: Collection, ids: Sequence[str]) -> None:
    """Delete passages in batches that Chroma accepts."""
    for at in range(0, len(ids), _PASSAGES_PER_CALL):
        collection.delete(ids=list(ids[at : at + _PASSAGES_PER_CALL]))


def text_of(passage: Passage) -> str:
    """Return a passage as it appears in prompts: the title, if it has one, and the text."""
    return f"{passage.title}\n{passage.text}".strip()


def prompt_maker(database: Database) -> Callable[[str, Sequence[Passage]], BlockPrompt]:
    """Return a function that creates ``ask``'s prompt from a question and passages."""
    from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL

    llm = adapter.BlockAttentionLLM(engine=database.engine, block_template=database.template)

    def prompt(question: str, passages: Sequence[Passage]) -> BlockPrompt:
        context = "\n\n".join(wrap(text_of(passage)) for passage in passages)
        return llm.filled(DEFAULT_TEXT_QA_PROMPT_SEL, context_str=context, query_str=question)

    return prompt


def retriever(database: Database) -> Callable[[str, int], list[Passage]]:
    """Return a function that retrieves a number of passages for a question, as ``ask`` does."""

    def nearest(question: str, count: int) -> list[Passage]:
        hits = distinct_retriever(database, count).retrieve(question)
        return [Passage("", text) for hit in hits if (text := adapter.canonical_text(hit.node))]

    return nearest


def distinct_retriever(database: Database, top_k: int) -> BaseRetriever:
    """Create a retriever of the nearest passages that returns each text once.

    Otherwise, duplicates, such as copies of a file in two folders, would crowd out other passages.
    """
    from llama_index.core import VectorStoreIndex
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.vector_stores.chroma import ChromaVectorStore

    collection = database.collection
    store = ChromaVectorStore(chroma_collection=collection)
    index = VectorStoreIndex.from_vector_store(store, embed_model=database.embedding)

    class Distinct(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            asked = top_k
            while True:
                hits = index.as_retriever(similarity_top_k=asked).retrieve(query_bundle)
                first: dict[str, NodeWithScore] = {}
                for hit in hits:
                    first.setdefault(adapter.canonical_text(hit.node), hit)
                if len(first) >= top_k or len(hits) < asked:
                    return [*first.values()][:top_k]
                asked *= 2

    return Distinct()
