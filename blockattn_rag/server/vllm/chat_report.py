"""Reuse reports in answers to OpenAI clients.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.server.plan import BlockPlan, ServedBlocks
from blockattn_rag.server.protocol import FIELD

_DATA = "data: "
_SIGNS = ('"finish_reason":"', '"usage":{', '"kv_transfer_params":')
"""Texts that occur in the events that ``ChatReport`` changes."""


@dataclass(slots=True)
class Ticket:
    """State of a block-mode request while vLLM's handlers process it.

    Args:
        ensure_again: Function that checks all blocks of the prompt thoroughly, encodes missing
            ones, and returns the number of tokens of each encoded block by key.
        encoded: Number of tokens of each block that was encoded for this request, by key.
        keys: Keys of the context blocks, in order.
        served: Report on the blocks, or None until it is known.
    """

    plan: BlockPlan
    ensure_again: Callable[[], Awaitable[Mapping[str, int]]]
    encoded: Mapping[str, int] = field(default_factory=dict)
    keys: Sequence[str] = ()
    prompt_tokens: int = 0
    served: ServedBlocks | None = None


class ChatReport:
    """Adds the reuse report to a vLLM answer for OpenAI clients.

    The report replaces ``kv_transfer_params``. ``cached_tokens`` excludes blocks that were encoded
    for this request.

    Args:
        ticket: State of the request. None: full mode.
        reason: Why a chat with recognized passages was not answered in block mode.
    """

    def __init__(self, ticket: Ticket | None, recipe: RecipeOutline, reason: str = "") -> None:
        self._ticket = ticket
        self._recipe = recipe
        self._reason = reason

    def answer(self, answer: Any) -> dict[str, Any]:
        data: dict[str, Any] = answer.model_dump()
        self._edit(data)
        return {**data, FIELD: self._report()}

    def events(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Convert a stream. The report is added to the event with the finish reason."""
        return edited_events(events, self._edit, _SIGNS)

    def _edit(self, data: dict[str, Any]) -> None:
        data.pop("kv_transfer_params", None)  # vLLM 0.33 adds it to all events.
        if any(choice.get("finish_reason") for choice in data.get("choices", ())):
            data[FIELD] = self._report()
        served = self._ticket and self._ticket.served
        details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
        if served and details.get("cached_tokens"):
            computed = served.encoded_tokens + sum(served.recomputed)
            details["cached_tokens"] = max(details["cached_tokens"] - computed, 0)

    def _report(self) -> dict[str, Any]:
        if self._ticket is None:
            return {"mode": "full", **({"reason": self._reason} if self._reason else {})}
        if self._ticket.served is None:  # An aborted answer has no report.
            return {"mode": "block"}
        counts = self._ticket.served.reuse(self._ticket.plan.lengths, self._ticket.prompt_tokens)
        return {"mode": "block", **counts, "recipe": str(self._recipe)}


async def edited_events(
    events: AsyncGenerator[str, None],
    edit: Callable[[dict[str, Any]], None],
    signs: Sequence[str],
) -> AsyncGenerator[str, None]:
    """Apply ``edit`` to the JSON of all stream events that contain one of ``signs``."""
    try:
        async for event in events:
            if event.startswith(_DATA) and any(sign in event for sign in signs):
                data = json.loads(event.removeprefix(_DATA))
                edit(data)
                text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
                event = f"{_DATA}{text}\n\n"
            yield event
    finally:
        await events.aclose()
