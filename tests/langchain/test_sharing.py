"""LangChain and LlamaIndex reuse each other's entries."""

from __future__ import annotations

import pytest
from langchain_core.documents import Document
from llama_index.core.llms import ChatMessage
from llama_index.core.schema import MetadataMode, TextNode

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVTransformer,
    ChatBlockAttention,
    format_blocks,
)
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVTransform, as_block_node

TEXTS = ["The tower is tall.", "The lake is deep.", "The river is long."]
TITLED = BlockDocumentPrompt.from_template("title: {title}\n\n{page_content}")


@pytest.mark.parametrize("first", ["langchain", "llama_index"])
@pytest.mark.parametrize("titled", [True, False])
def test_frameworks_share_entries(engine: BlockAttentionEngine, first: str, titled: bool) -> None:
    chat = ChatBlockAttention(engine=engine, max_tokens=6)
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=6)
    metadata = {"title": "T"} if titled else {}
    prompt = TITLED if titled else BlockDocumentPrompt()
    documents = [Document(text, metadata=dict(metadata)) for text in TEXTS]
    nodes = [TextNode(text=text, metadata=dict(metadata)) for text in TEXTS]

    def by_langchain() -> tuple[str, int]:
        stamped = BlockKVTransformer(llm=chat, document_prompt=prompt)
        context = format_blocks(stamped.transform_documents(documents), prompt)
        answer = chat.invoke([("system", f"Context:\n{context}"), ("human", "Which?")])
        return str(answer.content), answer.response_metadata["block_attention"]["misses"]

    def by_llama_index() -> tuple[str, int]:
        stamped = BlockKVTransform(engine=engine)(nodes)
        marked = [as_block_node(node).get_content(MetadataMode.LLM) for node in stamped]
        system = ChatMessage(role="system", content="Context:\n" + "\n\n".join(marked))
        answer = llm.chat([system, ChatMessage(role="user", content="Which?")])
        return str(answer.message.content), answer.raw["usage"]["misses"]

    ways = [by_langchain, by_llama_index]
    one, other = ways if first == "langchain" else reversed(ways)
    answer, _ = one()
    entries = engine.store.stats().entries
    again, misses = other()
    assert (again, misses) == (answer, 0)
    assert engine.store.stats().entries == entries
