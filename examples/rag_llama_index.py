"""Answer questions about documents with LlamaIndex, Chroma and a MiniLM embedding model.

    pip install -c constraints.txt llama-index-embeddings-huggingface
    python examples/rag_llama_index.py "When was the Eiffel Tower built?"
    python examples/rag_llama_index.py --folder my-documents --db my-db --model path/to/model

A second run with the same --db does not encode the passages again, because that folder contains
them with their embeddings, and their keys and values.
"""

import argparse
from pathlib import Path

import chromadb
from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.vector_stores.chroma import ChromaVectorStore

from blockattn_rag.app.rag.names import minilm
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockKVTransform,
    configure,
)

HERE = Path(__file__).parent
QUESTIONS = [
    "Which elements did Marie Curie discover?",
    "When was the Great Barrier Reef made a World Heritage Site?",
    "Where has the Rosetta Stone been shown since 1802?",
]


def open_index(
    folder: Path, db: Path, llm: BlockAttentionLLM, embedding: BaseEmbedding
) -> VectorStoreIndex:
    """Open the index of a folder of documents, and create it if the database is empty."""
    collection = chromadb.PersistentClient(str(db / "chroma")).get_or_create_collection("passages")
    vectors = ChromaVectorStore(chroma_collection=collection)
    if not collection.count():
        splitter = SentenceSplitter(chunk_size=256, chunk_overlap=0)
        steps = [splitter, BlockKVTransform(llm=llm), embedding]
        pipeline = IngestionPipeline(transformations=steps, vector_store=vectors)
        pipeline.run(documents=SimpleDirectoryReader(folder).load_data())
    return VectorStoreIndex.from_vector_store(vectors, embed_model=embedding)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask questions about a folder of documents.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--folder", type=Path, default=HERE / "articles")
    parser.add_argument("--db", type=Path, default=Path("example-db/llama-index"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--embedding", default=minilm())
    options = parser.parse_args()

    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    llm = BlockAttentionLLM(
        model_name=options.model, kv_store=str(options.db / "kv"), max_new_tokens=64
    )
    configure(llm)
    index = open_index(
        options.folder, options.db, llm, HuggingFaceEmbedding(model_name=options.embedding)
    )
    engine = index.as_query_engine(
        similarity_top_k=2, node_postprocessors=[BlockKVPostprocessor()], streaming=True
    )
    for question in options.questions:
        print(f"\n{question}")
        engine.query(question).print_response_stream()
        print()


if __name__ == "__main__":
    main()
