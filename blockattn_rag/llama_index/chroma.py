"""What Chroma asks for at ingestion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.schema import BaseNode
from llama_index.vector_stores.chroma import ChromaVectorStore


def add_nodes(vector_store: ChromaVectorStore, nodes: Sequence[BaseNode], client: Any) -> list[str]:
    """Add embedded nodes in batches of what the Chroma server accepts at once; their ids.

    ``ChromaVectorStore.add`` sends up to 41665 nodes at once, which Chroma 1 refuses. As there, a
    node whose id is in the collection already is left as it was: delete it first to replace it.

    Args:
        vector_store: on a collection of ``client``.
        nodes: with embeddings.
        client: the Chroma client, embedded or HTTP.
    """
    size = client.get_max_batch_size()
    batches = (list(nodes[at : at + size]) for at in range(0, len(nodes), size))
    return [node_id for batch in batches for node_id in vector_store.add(batch)]
