"""What an answer cost, as an instrumentation event and as the ``usage`` of a response."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llama_index.core.instrumentation.events import BaseEvent

if TYPE_CHECKING:
    from blockattn_rag.engine.results import Generation


class BlockReuseEvent(BaseEvent):
    """Dispatched once per answer, when its last token is there.

    ``hits`` and ``misses`` count context blocks found in the store and computed now; tokens and
    seconds are those of ``blockattn_rag.ReuseStats``.
    """

    mode: str
    hits: int
    misses: int
    reused_tokens: int
    computed_tokens: int
    generated_tokens: int
    fetch_s: float
    assemble_s: float
    prefill_s: float
    ttft_s: float
    total_s: float

    @classmethod
    def class_name(cls) -> str:
        return "BlockReuseEvent"

    @classmethod
    def of(cls, generation: Generation) -> BlockReuseEvent:
        return cls(**asdict(generation.stats))


def usage_of(generation: Generation) -> dict[str, Any]:
    """Token counts under the names that LlamaIndex's own counters read, and the reuse figures."""
    stats = generation.stats
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "cached_tokens": stats.reused_tokens,
        **asdict(stats),
    }
