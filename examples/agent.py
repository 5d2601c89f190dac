"""Answer questions about documents with a LangChain agent, Chroma and a MiniLM embedding model.

    pip install -c constraints.txt langchain-huggingface sentence-transformers \\
        langchain-text-splitters
    python examples/agent.py "Where has the Rosetta Stone been shown since 1802?"
    python examples/agent.py --tool --model path/to/model-that-calls-tools

By default, passages are retrieved before the model answers, because small models are unreliable at
tool calling. The history then contains the retrieval as a tool call with its result. With
``--tool``, the model calls the retriever itself, which needs a chat template that supports tools,
such as that of Qwen2.5-7B-Instruct. In both cases, all turns reuse the stored passages.
"""

import argparse
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.retrievers import BaseRetriever
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.state import CompiledStateGraph
from rag_langchain import HERE, QUESTIONS, open_retriever

from blockattn_rag.app.rag.names import minilm
from blockattn_rag.langchain import (
    ChatBlockAttention,
    RetrieveFirst,
    block_retriever_tool,
    without_markers,
)


def make_agent(
    chat: ChatBlockAttention, retriever: BaseRetriever, *, tool: bool = False
) -> CompiledStateGraph:
    """Create an agent that retrieves passages for every question, or through a tool call."""
    tools = [block_retriever_tool(retriever, "articles", "Looks up articles.")] if tool else []
    return create_agent(
        chat,
        tools,
        system_prompt="Answer in one short sentence.",
        middleware=[] if tool else [RetrieveFirst(retriever)],
        checkpointer=InMemorySaver(),
    )


def ask(agent: CompiledStateGraph, question: str) -> AIMessage:
    """Ask the next question of the conversation, print each step, and return the answer."""
    thread = {"configurable": {"thread_id": "1"}}
    messages = agent.invoke({"messages": [HumanMessage(question)]}, thread)["messages"]
    asked = max(i for i, message in enumerate(messages) if isinstance(message, HumanMessage))
    for message in messages[asked:-1]:
        if isinstance(message, AIMessage):
            print(f"looks up: {[call['args'] for call in message.tool_calls]}")
        elif isinstance(message, ToolMessage):
            print(f"finds: {without_markers(message).text.splitlines()[0]}")
    return messages[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask an agent about a folder of documents.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--folder", type=Path, default=HERE / "articles")
    parser.add_argument("--db", type=Path, default=Path("example-db/langchain"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--embedding", default=minilm())
    parser.add_argument("--tool", action="store_true", help="Let the model call the retriever")
    options = parser.parse_args()

    from langchain_huggingface import HuggingFaceEmbeddings

    chat = ChatBlockAttention(model=options.model, kv_store=str(options.db / "kv"), max_tokens=64)
    embedding = HuggingFaceEmbeddings(model_name=options.embedding)
    retriever = open_retriever(options.folder, options.db, chat, embedding)
    agent = make_agent(chat, retriever, tool=options.tool)
    for question in options.questions:
        print(f"\n> {question}")
        answer = ask(agent, question)
        reuse = answer.response_metadata["block_attention"]
        print(answer.text)
        print(f"({reuse['reused_tokens']} tokens reused, {reuse['computed_tokens']} computed)")


if __name__ == "__main__":
    main()
