"""What users of LangChain and LlamaIndex do, run with this package's models and with the
frameworks' own local ones, where these are installed: works with reuse, works, or fails.

    python benchmarks/use_cases.py [--only NAME]

Each use is a small function. What it asks of a model goes to the bundled one, over passages that
were ingested. It fails if it raises or gives no answer; what the answer says is not judged. Prints
a table. The peers need langchain-huggingface and llama-index-llms-huggingface.
"""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.schema import TextNode
from pydantic import BaseModel, Field

import blockattn_rag
from blockattn_rag import BlockAttentionEngine
from blockattn_rag.demo.corpus import bundled_corpus
from blockattn_rag.engine.pending import PendingRequest
from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    RetrieveFirst,
    format_blocks,
)
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockCitationQueryEngine,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
)
from blockattn_rag.store import MemoryStore

QUESTION = "What is the height of Halden Tower?"
TOKENS = 16


class Height(BaseModel):
    """How tall something is."""

    metres: int = Field(ge=0, le=999)


Use = Callable[[Any], Any]
USES: dict[tuple[str, str], Use] = {}


def use(framework: str, name: str) -> Callable[[Use], Use]:
    """Registers a use. It returns an answer."""

    def register(function: Use) -> Use:
        USES[framework, name] = function
        return function

    return register


@dataclass
class LangChainKit:
    """What a LangChain user has: a chat model, passages in a vector store, a way to show them."""

    chat: Any
    show: Callable[[list[Document]], str]
    document_prompt: Any
    store: InMemoryVectorStore
    prompt: ChatPromptTemplate = field(
        default_factory=lambda: ChatPromptTemplate.from_messages(
            [("system", "Use only this context.\n\nContext:\n{context}"), ("human", "{input}")]
        )
    )

    @property
    def retriever(self) -> Any:
        return self.store.as_retriever(search_kwargs={"k": 3})

    @property
    def chain(self) -> Any:
        shown = self.retriever | RunnableLambda(self.show)
        return {"context": shown, "input": RunnablePassthrough()} | self.prompt | self.chat


@dataclass
class LlamaIndexKit:
    """What a LlamaIndex user has: an LLM, an index, and postprocessors."""

    llm: Any
    index: VectorStoreIndex
    postprocessors: list[Any]
    citation: Any

    def query(self, **options: Any) -> Any:
        engine = self.index.as_query_engine(
            llm=self.llm, similarity_top_k=3, node_postprocessors=self.postprocessors, **options
        )
        return engine.query(QUESTION)


def langchain(name: str) -> Callable[[Use], Use]:
    return use("LangChain", name)


def llama_index(name: str) -> Callable[[Use], Use]:
    return use("LlamaIndex", name)


@langchain("chain: invoke")
def _(kit: LangChainKit) -> Any:
    return kit.chain.invoke(QUESTION).content


@langchain("chain: stream")
def _(kit: LangChainKit) -> Any:
    return "".join((kit.chain | StrOutputParser()).stream(QUESTION))


@langchain("chain: batch")
def _(kit: LangChainKit) -> Any:
    return kit.chain.batch([QUESTION] * 3)[2].content


@langchain("chain: ainvoke")
def _(kit: LangChainKit) -> Any:
    return asyncio.run(kit.chain.ainvoke(QUESTION)).content


@langchain("chain: astream_events")
def _(kit: LangChainKit) -> Any:
    async def kinds() -> set[str]:
        return {event["event"] async for event in kit.chain.astream_events(QUESTION)}

    return "on_chat_model_stream" in asyncio.run(kinds())


@langchain("conversation with history")
def _(kit: LangChainKit) -> Any:
    context = kit.show(kit.retriever.invoke(QUESTION))
    turns = [("system", context), ("human", QUESTION), ("ai", "214 metres."), ("human", "Sure?")]
    return kit.chat.invoke(turns).content


@langchain("create_stuff_documents_chain")
def _(kit: LangChainKit) -> Any:
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    chain = create_stuff_documents_chain(kit.chat, kit.prompt, document_prompt=kit.document_prompt)
    return chain.invoke({"context": kit.retriever.invoke(QUESTION), "input": QUESTION})


@langchain("create_retrieval_chain")
def _(kit: LangChainKit) -> Any:
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain

    stuff = create_stuff_documents_chain(kit.chat, kit.prompt, document_prompt=kit.document_prompt)
    return create_retrieval_chain(kit.retriever, stuff).invoke({"input": QUESTION})["answer"]


@langchain("MultiQueryRetriever")
def _(kit: LangChainKit) -> Any:
    from langchain_classic.retrievers import MultiQueryRetriever

    return MultiQueryRetriever.from_llm(kit.retriever, kit.chat).invoke(QUESTION)


@langchain("stop strings")
def _(kit: LangChainKit) -> Any:
    return kit.chat.bind(stop=["metres"]).invoke(QUESTION).content


@langchain("answer cache")
def _(kit: LangChainKit) -> Any:
    from langchain_core.caches import InMemoryCache

    cached = kit.chat.model_copy(update={"cache": InMemoryCache()})
    return [cached.invoke(QUESTION).content for _ in range(2)][1]


@langchain("usage_metadata")
def _(kit: LangChainKit) -> Any:
    return kit.chain.invoke(QUESTION).usage_metadata


@langchain("profile")
def _(kit: LangChainKit) -> Any:
    return kit.chat.profile["max_input_tokens"]


@langchain("bind_tools")
def _(kit: LangChainKit) -> Any:
    return kit.chat.bind_tools([_look_up]).invoke(QUESTION)


def _structured(method: str) -> Use:
    def ask(kit: LangChainKit) -> Any:
        return kit.chat.with_structured_output(Height, method=method).invoke(QUESTION)

    return ask


for _method in ("json_schema", "json_mode", "function_calling"):
    langchain(f"with_structured_output: {_method}")(_structured(_method))


@langchain("with_structured_output: include_raw, over passages")
def _(kit: LangChainKit) -> Any:
    structured = kit.chat.with_structured_output(Height, include_raw=True)
    shown = kit.show(kit.retriever.invoke(QUESTION))
    return structured.invoke(kit.prompt.invoke({"context": shown, "input": QUESTION}))["parsed"]


@langchain("with_structured_output: stream")
def _(kit: LangChainKit) -> Any:
    schema = Height.model_json_schema()
    return list(kit.chat.with_structured_output(schema).stream(QUESTION))


@langchain("create_agent: response_format")
def _(kit: LangChainKit) -> Any:
    from langchain.agents import create_agent

    agent: Any = create_agent(kit.chat, [], response_format=Height)
    return agent.invoke({"messages": [("human", QUESTION)]})["structured_response"]


@langchain("create_agent: passages looked up first")
def _(kit: LangChainKit) -> Any:
    from langchain.agents import create_agent

    agent: Any = create_agent(kit.chat, [], middleware=[RetrieveFirst(kit.retriever)])
    return agent.invoke({"messages": [("human", QUESTION)]})["messages"][-1].text


def _look_up(question: str) -> str:
    """Look up passages."""
    return question


@llama_index("query engine: compact")
def _(kit: LlamaIndexKit) -> Any:
    return str(kit.query())


@llama_index("query engine: refine")
def _(kit: LlamaIndexKit) -> Any:
    return str(kit.query(response_mode="refine"))


@llama_index("query engine: tree_summarize")
def _(kit: LlamaIndexKit) -> Any:
    return str(kit.query(response_mode="tree_summarize"))


@llama_index("query engine: accumulate")
def _(kit: LlamaIndexKit) -> Any:
    return str(kit.query(response_mode="accumulate"))


@llama_index("query engine: streaming")
def _(kit: LlamaIndexKit) -> Any:
    return "".join(kit.query(streaming=True).response_gen)


@llama_index("citations")
def _(kit: LlamaIndexKit) -> Any:
    engine = kit.citation.from_args(kit.index, llm=kit.llm, similarity_top_k=3)
    return str(engine.query(QUESTION))


@llama_index("chat engine: context")
def _(kit: LlamaIndexKit) -> Any:
    engine = kit.index.as_chat_engine(
        "context", llm=kit.llm, node_postprocessors=kit.postprocessors, similarity_top_k=3
    )
    return [str(engine.chat(QUESTION)) for _ in range(2)][1]


@llama_index("chat engine: condense_plus_context")
def _(kit: LlamaIndexKit) -> Any:
    engine = kit.index.as_chat_engine(
        "condense_plus_context", llm=kit.llm, node_postprocessors=kit.postprocessors
    )
    return [str(engine.chat(QUESTION)) for _ in range(2)][1]


@llama_index("achat")
def _(kit: LlamaIndexKit) -> Any:
    return asyncio.run(kit.llm.achat([ChatMessage(QUESTION)])).message.content


@llama_index("stream_chat")
def _(kit: LlamaIndexKit) -> Any:
    return "".join(step.delta or "" for step in kit.llm.stream_chat([ChatMessage(QUESTION)]))


@llama_index("structured_predict")
def _(kit: LlamaIndexKit) -> Any:
    return kit.llm.structured_predict(Height, PromptTemplate(QUESTION))


@llama_index("stream_structured_predict")
def _(kit: LlamaIndexKit) -> Any:
    return list(kit.llm.stream_structured_predict(Height, PromptTemplate(QUESTION)))


@llama_index("as_structured_llm")
def _(kit: LlamaIndexKit) -> Any:
    return kit.llm.as_structured_llm(Height).chat([ChatMessage(QUESTION)]).raw


@llama_index("query engine: output_cls")
def _(kit: LlamaIndexKit) -> Any:
    return kit.query(output_cls=Height).response


@llama_index("predict_and_call")
def _(kit: LlamaIndexKit) -> Any:
    from llama_index.core.tools import FunctionTool

    return kit.llm.predict_and_call([FunctionTool.from_defaults(_look_up)], QUESTION)


def passages() -> list[str]:
    return [passage.text for passage in bundled_corpus()[:30]]


def own_langchain(engine: BlockAttentionEngine) -> LangChainKit:
    chat = ChatBlockAttention(engine=engine, max_tokens=TOKENS)
    documents = BlockKVTransformer(llm=chat).transform_documents(list(map(Document, passages())))
    store = InMemoryVectorStore.from_documents(list(documents), HashingEmbeddings())
    return LangChainKit(chat, format_blocks, BlockDocumentPrompt(), store)


def own_llama_index(engine: BlockAttentionEngine) -> LlamaIndexKit:
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=TOKENS)
    nodes = BlockKVTransform(llm=llm)([TextNode(text=text) for text in passages()])
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
    return LlamaIndexKit(llm, index, [BlockKVPostprocessor()], BlockCitationQueryEngine)


def installed(module: str) -> Any:
    """A module that not everybody has; None without it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def peer_langchain(folder: str) -> LangChainKit | None:
    """``ChatHuggingFace``, if it is installed."""
    if (package := installed("langchain_huggingface")) is None:
        return None
    pipeline = package.HuggingFacePipeline.from_model_id(
        folder, "text-generation", pipeline_kwargs={"max_new_tokens": TOKENS}
    )
    store = InMemoryVectorStore.from_documents(list(map(Document, passages())), HashingEmbeddings())

    def show(found: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in found)

    return LangChainKit(package.ChatHuggingFace(llm=pipeline), show, None, store)


def peer_llama_index(folder: str) -> LlamaIndexKit | None:
    """``HuggingFaceLLM``, if it is installed."""
    if (package := installed("llama_index.llms.huggingface")) is None:
        return None
    from llama_index.core.query_engine import CitationQueryEngine

    llm = package.HuggingFaceLLM(
        model_name=folder, tokenizer_name=folder, max_new_tokens=TOKENS, is_chat_model=True
    )
    nodes = [TextNode(text=text) for text in passages()]
    index = VectorStoreIndex(nodes, embed_model=HashingEmbedding())
    return LlamaIndexKit(llm, index, [], CitationQueryEngine)


@contextmanager
def noted(engine: BlockAttentionEngine) -> Iterator[list[PendingRequest]]:
    """What an engine was asked, in whichever way."""
    asked: list[PendingRequest] = []
    answer_batch = engine.answer_batch

    def note(requests: Sequence[PendingRequest]) -> None:
        asked.extend(requests)
        answer_batch(requests)

    engine.answer_batch = note  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        engine.answer_batch = answer_batch  # type: ignore[method-assign]


def outcome(function: Use, kit: Any) -> str:
    """What came of a use: nothing but "works", or what it fails with."""
    if kit is None:
        return "not installed"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "works" if function(kit) else "fails: no answer"
    except Exception as error:  # noqa: BLE001 - that is what is to be found out
        return f"fails: {type(error).__name__}"


def main(
    only: Annotated[str, typer.Option(help="Uses whose name has this in it.")] = "",
) -> None:
    """Run the uses; print a table."""
    folder = str(Path(blockattn_rag.__file__).parent / "demo" / "model")
    # No tails are kept (`engine.tails`): the uses ask one question again and again.
    store = MemoryStore(1 << 30)
    engine = BlockAttentionEngine.from_pretrained("bundled", store=store, resident_bytes=0)
    own = {"LangChain": own_langchain(engine), "LlamaIndex": own_llama_index(engine)}
    peers = {"LangChain": peer_langchain(folder), "LlamaIndex": peer_llama_index(folder)}
    print("| | use | blockattn_rag | the framework's own local model |\n|---|---|---|---|")
    for (framework, name), function in USES.items():
        if only not in name:
            continue
        with noted(engine) as asked:
            found = outcome(function, own[framework])
        if found == "works" and asked:
            answers = [request.answer.result() for request in asked]
            reused = sum(answer.stats.reused_tokens for answer in answers)
            total = sum(answer.stats.prompt_tokens for answer in answers)
            found += f" with reuse ({100 * reused / total:.0f} %)" if reused else ""
        peer = outcome(function, peers[framework])
        print(f"| {framework} | {name} | {found} | {peer} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
