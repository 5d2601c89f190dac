"""Fixtures: a tiny engine that records its calls, and passages."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from typing import Any, NamedTuple

import llama_index.core
import pytest
from llama_index.core import Settings
from llama_index.core.schema import BaseNode, NodeWithScore, TextNode

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.llama_index import BlockAttentionLLM, BlockKVPostprocessor, BlockKVTransform
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.store import MemoryStore
from tests.engines import batch_sizes, tuned_model


class Call(NamedTuple):
    prompt: BlockPrompt
    options: dict[str, Any]
    answer: Generation


class RecordingEngine(BlockAttentionEngine):
    """Engine that records its prompts and answers, and the sizes of its batches of more than one
    request."""

    def __init__(self, model: BlockModel, **kwargs: Any) -> None:
        super().__init__(model, MemoryStore(1 << 28), **kwargs)
        self.calls: list[Call] = []
        self.batches = batch_sizes(self)

    def generate(self, prompt: Any, **options: Any) -> Generation:
        answer = super().generate(prompt, **options)
        self.calls.append(Call(prompt, options, answer))
        return answer

    async def agenerate(self, prompt: Any, **options: Any) -> Generation:
        made: list[BlockPrompt] = []

        def make_prompt() -> BlockPrompt:
            made.append(prompt())
            return made[0]

        answer = await super().agenerate(make_prompt, **options)
        self.calls.append(Call(made[0], options, answer))
        return answer

    def stream(self, prompt: Any, **options: Any) -> Generator[GenerationChunk, None, None]:
        for chunk in super().stream(prompt, **options):
            if chunk.generation is not None:
                self.calls.append(Call(prompt, options, chunk.generation))
            yield chunk

    async def astream(self, prompt: Any, **options: Any) -> AsyncGenerator[GenerationChunk, None]:
        made = prompt()
        async for chunk in super().astream(made, **options):
            if chunk.generation is not None:
                self.calls.append(Call(made, options, chunk.generation))
            yield chunk


@pytest.fixture(scope="session")
def block_model() -> BlockModel:
    return tuned_model(max_position_embeddings=8192)


@pytest.fixture
def engine(block_model: BlockModel) -> RecordingEngine:
    return RecordingEngine(block_model)


@pytest.fixture
def llm(engine: RecordingEngine) -> BlockAttentionLLM:
    return BlockAttentionLLM(engine=engine, max_new_tokens=4)


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
