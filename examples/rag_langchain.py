"""Answer questions about documents with LangChain, Chroma and a MiniLM embedding model.

    pip install -c constraints.txt langchain-huggingface sentence-transformers \\
        langchain-text-splitters
    python examples/rag_langchain.py "When was the Eiffel Tower built?"
    python examples/rag_langchain.py --folder my-notes --db my-db --model path/to/model

A second run with the same --db does not encode the passages again, because that folder contains
them with their embeddings, and their keys and values.
"""

import argparse
from pathlib import Path

from langchain_chroma import Chroma
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_text_splitters import RecursiveCharacterTextSplitter

from blockattn_rag.app.rag.names import minilm
from blockattn_rag.langchain import BlockKVTransformer, ChatBlockAttention, format_blocks

HERE = Path(__file__).parent
QUESTIONS = [
    "Which elements did Marie Curie discover?",
    "When was the Great Barrier Reef made a World Heritage Site?",
    "Where has the Rosetta Stone been shown since 1802?",
]
PROMPT = ChatPromptTemplate.from_template(
    "{context}\n\nQuestion: {question}\nAnswer in one short sentence."
)


def open_retriever(
    folder: Path, db: Path, chat: ChatBlockAttention, embedding: Embeddings
) -> BaseRetriever:
    """Open a retriever for a folder of text and Markdown, indexed if the database is empty."""
    vectors = Chroma("passages", embedding, persist_directory=str(db / "chroma"))
    if not vectors.get(limit=1)["ids"]:
        files = sorted(path for path in folder.rglob("*") if path.suffix in {".md", ".txt"})
        documents = [
            Document(path.read_text("utf-8"), metadata={"source": str(path)}) for path in files
        ]
        splitter = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=0)
        passages = BlockKVTransformer(llm=chat).transform_documents(
            splitter.split_documents(documents)
        )
        vectors.add_documents(list(passages))
    return vectors.as_retriever(search_kwargs={"k": 2})


def chain_of(retriever: BaseRetriever, chat: ChatBlockAttention) -> Runnable:
    inputs = {"context": retriever | format_blocks, "question": RunnablePassthrough()}
    return inputs | PROMPT | chat


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask questions about a folder of documents.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--folder", type=Path, default=HERE / "articles")
    parser.add_argument("--db", type=Path, default=Path("example-db/langchain"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--embedding", default=minilm())
    options = parser.parse_args()

    from langchain_huggingface import HuggingFaceEmbeddings

    chat = ChatBlockAttention(model=options.model, kv_store=str(options.db / "kv"), max_tokens=64)
    retriever = open_retriever(
        options.folder, options.db, chat, HuggingFaceEmbeddings(model_name=options.embedding)
    )
    chain = chain_of(retriever, chat)
    for question in options.questions:
        answer = chain.invoke(question)
        reuse = answer.response_metadata["block_attention"]
        print(f"\n{question}\n{answer.content}")
        print(
            f"({reuse['reused_tokens']} tokens reused, {reuse['computed_tokens']} computed, "
            f"first token after {reuse['ttft_s']:.2f} s)"
        )


if __name__ == "__main__":
    main()
