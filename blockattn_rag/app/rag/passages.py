"""A database's passages: all of them, and those that its retriever finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import blockattn_rag.llama_index as adapter
from blockattn_rag.adapters.handles import records_of
from blockattn_rag.app.rag.database import Database
from blockattn_rag.prompts.blocks import Block

if TYPE_CHECKING:
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle


def all_passages(database: Database) -> list[str]:
    """The canonical texts of a database's passages, each once, sorted."""
    from llama_index.core.vector_stores.utils import metadata_dict_to_node

    nodes: Iterator[BaseNode] = (
        metadata_dict_to_node(metadata, text=document)
        for metadata, document in records_of(database.collection, "metadatas", "documents")
    )
    return sorted({text for node in nodes if (text := adapter.canonical_text(node))})


def passage_blocks(database: Database) -> list[Block]:
    """The blocks of a database's passages, as its prompts hold them."""
    return [Block(text, database.template) for text in all_passages(database)]


def retriever(database: Database) -> Callable[[str, int], list[str]]:
    """What gives a question's best passages, at most so many, as ``ask`` finds them."""

    def nearest(question: str, count: int) -> list[str]:
        found = distinct_retriever(database, count).retrieve(question)
        return [text for hit in found if (text := adapter.canonical_text(hit.node))]

    return nearest


def distinct_retriever(database: Database, top_k: int) -> BaseRetriever:
    """Retriever of the nearest passages of a database, each text once.

    Equal texts, such as those of one file in two folders, would take the places of others.
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
                found = index.as_retriever(similarity_top_k=asked).retrieve(query_bundle)
                first: dict[str, NodeWithScore] = {}
                for hit in found:
                    first.setdefault(adapter.canonical_text(hit.node), hit)
                if len(first) >= top_k or len(found) < asked:
                    return [*first.values()][:top_k]
                asked *= 2

    return Distinct()
