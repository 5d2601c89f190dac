"""Kits for the use cases: models, ingested passages, and functions that insert passages in prompts.

Each framework has a kit with this package's models and one with the framework's own local models.
Both load the same folder: the bundled model, with a chat template that supports tools.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langchain_core.vectorstores import InMemoryVectorStore
from llama_index.core import PromptHelper, Settings, VectorStoreIndex, get_response_synthesizer
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import TextNode
from registry import QUESTION

import blockattn_rag
from blockattn_rag import BlockAttentionEngine
from blockattn_rag.app.demo.corpus import bundled_corpus
from blockattn_rag.langchain import (
    BlockDocumentPrompt,
    BlockKVTransformer,
    ChatBlockAttention,
    HashingEmbeddings,
    block_retriever_tool,
    format_blocks,
)
from blockattn_rag.llama_index import (
    BlockAttentionLLM,
    BlockCitationQueryEngine,
    BlockKVPostprocessor,
    BlockKVTransform,
    HashingEmbedding,
    block_response_synthesizer,
    configure,
)

TOKENS = 16
"""Maximum number of tokens in a text answer."""
OBJECT_TOKENS = 160
"""Maximum number of tokens in an answer that is an object or a call."""

TEMPLATE = """
{{- bos_token }}
{%- if tools %}
    {{- '<|system|>\\nCall tools as <tool_call>{"name": ..., "arguments": ...}</tool_call>:' }}
    {%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + ('user' if message.role == 'tool' else message.role) + '|>\\n' }}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}
"""
"""The bundled model's chat template, extended with tools in Hermes format."""


@dataclass
class LangChainKit:
    """Components of a LangChain application.

    ``caller`` is ``chat`` with a higher token limit. ``encode`` is the ingestion step for
    documents; ``show`` and ``document_prompt`` insert passages in prompts.
    """

    chat: Any
    caller: Any
    encode: Callable[[list[Document]], list[Document]]
    show: Callable[[list[Document]], str]
    document_prompt: Any
    make_tool: Callable[..., Any]
    store: InMemoryVectorStore = field(init=False)

    prompt = ChatPromptTemplate.from_messages(
        [("system", "Use only this context.\n\nContext:\n{context}"), ("human", "{input}")]
    )

    def __post_init__(self) -> None:
        documents = self.encode([Document(text) for text in passages()])
        self.store = InMemoryVectorStore.from_documents(documents, HashingEmbeddings())

    def prepare(self) -> None:
        """Do nothing: LangChain has no global settings."""

    @property
    def retriever(self) -> Any:
        return self.store.as_retriever(search_kwargs={"k": 3})

    @property
    def tool(self) -> Any:
        """Return the retriever as a tool."""
        return self.make_tool(self.retriever, "encyclopedia", "Looks up towers and lakes.")

    @property
    def chain(self) -> Any:
        return self.chain_over(self.retriever)

    def chain_over(self, retriever: Any) -> Any:
        """Return the usual RAG chain: retriever, prompt, model."""
        context = retriever | RunnableLambda(self.show)
        return {"context": context, "input": RunnablePassthrough()} | self.prompt | self.chat

    def found(self) -> str:
        """Return retrieved passages in the format for prompts."""
        return self.show(self.retriever.invoke(QUESTION))


@dataclass
class LlamaIndexKit:
    """Components of a LlamaIndex application.

    ``caller`` is ``llm`` with a higher token limit. ``transforms`` returns the last ingestion
    steps; its options select the text of a node in prompts. ``synthesizer`` replaces LlamaIndex's
    ``get_response_synthesizer``.
    """

    llm: Any
    caller: Any
    transforms: Callable[..., list[Any]]
    postprocessors: list[Any]
    citation: Any
    synthesizer: Callable[..., Any]
    configure: Callable[[Any], None]
    index: VectorStoreIndex = field(init=False)

    def __post_init__(self) -> None:
        self.prepare()
        nodes: Sequence[Any] = [TextNode(text=text) for text in passages()]
        for transform in self.transforms():
            nodes = transform(nodes)
        self.index = VectorStoreIndex(list(nodes))

    def prepare(self) -> None:
        """Set this kit's model as LlamaIndex's default."""
        Settings.embed_model = HashingEmbedding()
        self.configure(self.llm)

    @property
    def retriever(self) -> Any:
        return self.index.as_retriever(similarity_top_k=3)

    def engine(self, **options: Any) -> Any:
        options = {"llm": self.llm, "node_postprocessors": self.postprocessors} | options
        return self.index.as_query_engine(similarity_top_k=3, **options)

    def query(self, **options: Any) -> Any:
        return self.engine(**options).query(QUESTION)


def passages() -> list[str]:
    return [passage.text for passage in bundled_corpus()[:30]]


def model_folder(folder: Path) -> str:
    """Save the bundled model with a chat template that supports tools, and return the folder."""
    bundled = Path(blockattn_rag.__file__).parent / "model" / "bundled"
    shutil.copytree(bundled, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return str(folder)


def own_langchain(engine: BlockAttentionEngine) -> LangChainKit:
    chat = ChatBlockAttention(engine=engine, max_tokens=TOKENS)

    def encode(documents: list[Document]) -> list[Document]:
        return list(BlockKVTransformer(llm=chat).transform_documents(documents))

    return LangChainKit(
        chat=chat,
        caller=ChatBlockAttention(engine=engine, max_tokens=OBJECT_TOKENS),
        encode=encode,
        show=format_blocks,
        document_prompt=BlockDocumentPrompt(),
        make_tool=block_retriever_tool,
    )


def own_llama_index(engine: BlockAttentionEngine) -> LlamaIndexKit:
    llm = BlockAttentionLLM(engine=engine, max_new_tokens=TOKENS)

    def transforms(**options: Any) -> list[Any]:
        return [BlockKVTransform(llm=llm, **options)]

    return LlamaIndexKit(
        llm=llm,
        caller=BlockAttentionLLM(engine=engine, max_new_tokens=OBJECT_TOKENS),
        transforms=transforms,
        postprocessors=[BlockKVPostprocessor()],
        citation=BlockCitationQueryEngine,
        synthesizer=block_response_synthesizer,
        configure=configure,
    )


def installed(module: str) -> Any:
    """Import an optional module. Return None if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def peer_langchain(folder: str) -> LangChainKit | None:
    """Return a kit with ``ChatHuggingFace``, or None if it is not installed."""
    if (package := installed("langchain_huggingface")) is None:
        return None

    def chat(tokens: int) -> Any:
        options = {"max_new_tokens": tokens, "return_full_text": False}
        pipeline = package.HuggingFacePipeline.from_model_id(
            folder, "text-generation", pipeline_kwargs=options
        )
        # By default, LangChain would download the GPT-2 tokenizer to count tokens.
        count = pipeline.pipeline.tokenizer.encode
        return package.ChatHuggingFace(llm=pipeline, custom_get_token_ids=count)

    def show(found: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in found)

    return LangChainKit(
        chat=chat(TOKENS),
        caller=chat(OBJECT_TOKENS),
        encode=list,
        show=show,
        document_prompt=PromptTemplate.from_template("{page_content}"),
        make_tool=create_retriever_tool,
    )


def peer_llama_index(folder: str) -> LlamaIndexKit | None:
    """Return a kit with ``HuggingFaceLLM``, or None if it is not installed."""
    if (package := installed("llama_index.llms.huggingface")) is None:
        return None

    def llm(tokens: int) -> Any:
        return package.HuggingFaceLLM(
            model_name=folder, tokenizer_name=folder, max_new_tokens=tokens, is_chat_model=True
        )

    def configure_peer(llm: Any) -> None:
        Settings.llm = llm
        Settings.prompt_helper = PromptHelper.from_llm_metadata(llm.metadata)
        Settings.tokenizer = llm._tokenizer.encode

    return LlamaIndexKit(
        llm=llm(TOKENS),
        caller=llm(OBJECT_TOKENS),
        transforms=lambda **_: [],
        postprocessors=[],
        citation=CitationQueryEngine,
        synthesizer=lambda llm, response_mode, **options: get_response_synthesizer(
            llm, response_mode=response_mode, **options
        ),
        configure=configure_peer,
    )
