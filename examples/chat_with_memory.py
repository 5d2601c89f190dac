"""Chat about documents, with memory, using LlamaIndex, Chroma and a MiniLM embedding model.

    pip install -c constraints.txt llama-index-embeddings-huggingface
    python examples/chat_with_memory.py
    python examples/chat_with_memory.py "Who was Marie Curie?" "Where was she born?"

Each turn retrieves passages for its question and loads their keys and values from the store. The
line after each answer shows how many prompt tokens were reused.
"""

import argparse
from pathlib import Path
from typing import Any

from llama_index.core import VectorStoreIndex
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.memory import ChatMemoryBuffer
from rag_llama_index import HERE, open_index

from blockattn_rag import ReuseStats
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockKVPostprocessor,
    BlockReuseEvent,
    configure,
)

TURNS = [
    "Which elements did Marie Curie discover?",
    "Where was Marie Curie born?",
    "How tall is the Eiffel Tower?",
]


class Reuse(BaseEventHandler):
    """Event handler that keeps the reuse statistics of the last answer."""

    last: ReuseStats | None = None

    def handle(self, event: BaseEvent, **kwargs: Any) -> None:
        if isinstance(event, BlockReuseEvent):
            self.last = event.stats


def open_chat(index: VectorStoreIndex, llm: BlockAttentionLLM) -> BaseChatEngine:
    return index.as_chat_engine(
        chat_mode="context",
        llm=llm,
        memory=ChatMemoryBuffer.from_defaults(token_limit=1500),
        similarity_top_k=2,
        node_postprocessors=[BlockKVPostprocessor()],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat about a folder of documents.")
    parser.add_argument("turns", nargs="*", default=TURNS)
    parser.add_argument("--folder", type=Path, default=HERE / "articles")
    parser.add_argument("--db", type=Path, default=Path("example-db/llama-index"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--embedding", default="sentence-transformers/all-MiniLM-L6-v2")
    options = parser.parse_args()

    from llama_index.embeddings.huggingface import HuggingFaceEmbedding

    llm = BlockAttentionLLM(
        model_name=options.model, kv_store=str(options.db / "kv"), max_new_tokens=64
    )
    configure(llm)
    embedding = HuggingFaceEmbedding(model_name=options.embedding)
    chat = open_chat(open_index(options.folder, options.db, llm, embedding), llm)
    reuse = Reuse()
    get_dispatcher().add_event_handler(reuse)
    for turn in options.turns:
        print(f"\n> {turn}")
        print(chat.chat(turn))
        stats = reuse.last
        print(f"({stats.reused_tokens} tokens reused, {stats.computed_tokens} computed)")


if __name__ == "__main__":
    main()
