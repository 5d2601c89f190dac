"""What an answer cost, as an instrumentation event and as the ``usage`` of a response."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from llama_index.core.bridge.pydantic import SerializerFunctionWrapHandler, model_serializer
from llama_index.core.instrumentation.events import BaseEvent

from blockattn_rag.engine.results import Generation, ReuseStats

_FIGURES = frozenset(field.name for field in fields(ReuseStats))


class BlockReuseEvent(BaseEvent):
    """Dispatched once per answer, when its last token is there.

    The figures of ``stats`` are attributes of the event too (``event.hits``), and fields of the
    event where it is written out.
    """

    stats: ReuseStats

    @classmethod
    def class_name(cls) -> str:
        return "BlockReuseEvent"

    def __getattr__(self, name: str) -> Any:
        if name in _FIGURES:
            return getattr(self.stats, name)
        return super().__getattr__(name)  # type: ignore[misc]

    @model_serializer(mode="wrap")
    def _flat(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        figures: dict[str, Any] = written.pop("stats")
        return {**written, **figures}


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
