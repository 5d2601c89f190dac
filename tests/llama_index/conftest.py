"""Fixtures: a tiny engine that records its calls, and passages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import llama_index.core
import pytest
from llama_index.core import Settings
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle, TextNode

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.pending import LatePrompt, PendingRequest, to_block_prompt
from blockattn_rag.engine.results import Generation
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVPostprocessor, BlockKVTransform
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.store import MemoryStore
from tests.engines import tuned_model
from tests.holding import LONGEST_S
from tests.scripted import Script, ScriptedEngine


class Call:
    """Request to an engine. ``prompt`` and ``answer`` exist once the request is answered."""

    prompt: BlockPrompt
    pending: PendingRequest

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = options

    @property
    def answer(self) -> Generation:
        return self.pending.answer.result(LONGEST_S)


class RecordingEngine(BlockAttentionEngine):
    """Engine that records its calls."""

    def __init__(self, model: BlockModel, store: Any = None, **kwargs: Any) -> None:
        super().__init__(model, store or MemoryStore(1 << 28), **kwargs)
        self.calls: list[Call] = []

    def _pending(
        self, prompt: LatePrompt, options: Mapping[str, Any], **scheduling: Any
    ) -> PendingRequest:
        call = Call(options)

        def recorded() -> BlockPrompt:
            call.prompt = to_block_prompt(prompt)
            return call.prompt

        call.pending = super()._pending(recorded, options, **scheduling)
        self.calls.append(call)
        return call.pending


@pytest.fixture(scope="session")
def block_model() -> BlockModel:
    return tuned_model(max_position_embeddings=8192)


@pytest.fixture
def engine(block_model: BlockModel) -> RecordingEngine:
    return RecordingEngine(block_model)


@pytest.fixture
def llm(engine: RecordingEngine) -> BlockAttentionLLM:
    return BlockAttentionLLM(engine=engine, max_new_tokens=4)


def scripted(answer: str | Script) -> BlockAttentionLLM:
    script = (lambda _: answer) if isinstance(answer, str) else answer
    return BlockAttentionLLM(engine=ScriptedEngine(script), max_new_tokens=300)


@pytest.fixture(autouse=True)
def _own_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reset LlamaIndex's global settings, and restore them after the test."""
    for name in ("_llm", "_prompt_helper", "_embed_model", "_callback_manager", "_node_parser"):
        monkeypatch.setattr(Settings, name, None)
    monkeypatch.setattr(llama_index.core, "global_tokenizer", None)


@pytest.fixture
def tokenized(block_model: BlockModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that are tokenized during the test."""
    texts: list[str] = []
    original = BlockTokenizer._ids

    def spy(self: BlockTokenizer, spans: Iterable[Span]) -> list[int]:
        spans = list(spans)
        texts.append("".join(span.text for span in spans))
        return original(self, spans)

    monkeypatch.setattr(BlockTokenizer, "_ids", spy)
    return texts


class Fixed(BaseRetriever):
    """Retriever that returns the same nodes for every query."""

    def __init__(self, nodes: Sequence[BaseNode]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node, score=1.0) for node in self._nodes]


def passages(count: int = 3, size: int = 80) -> list[BaseNode]:
    """Return nodes of about ``size`` characters without common words, the first with metadata."""
    nodes: list[BaseNode] = []
    for number in range(count):
        words = " ".join(f"w{number}x{i}" for i in range(size // 6))
        nodes.append(TextNode(text=f"  Passage {number}: {words}.\n", id_=f"p{number}"))
    nodes[0].metadata["title"] = "First"
    return nodes


def encoded(llm: BlockAttentionLLM, nodes: Sequence[BaseNode]) -> list[NodeWithScore]:
    """Ingest nodes. Returns them as retrieved and marked, with descending scores."""
    stamped = BlockKVTransform(llm=llm)(nodes)
    scored = [NodeWithScore(node=n, score=1.0 - i / 10) for i, n in enumerate(stamped)]
    return BlockKVPostprocessor().postprocess_nodes(scored)
