"""Reuse reports in answers to OpenAI clients.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.server.protocol import FIELD
from blockattn_rag.server.served_blocks import ServedBlocks
from blockattn_rag.server.vllm.openai import TokenPrompt

_DATA = "data: "
_COUNTS = '"usage":{'
_PARAMS = "kv_transfer_params"

ENDS = '"finish_reason":"'
"""Text that occurs in the events that end an answer."""


class ChatReport:
    """Adds the reuse report to a vLLM answer for OpenAI clients.

    The report replaces ``kv_transfer_params``. ``cached_tokens`` excludes blocks that were encoded
    for this request.

    Args:
        prompt: Prompt of the request, or None if vLLM rendered it.
        reason: Why a chat with recognized passages was not answered in block mode.
    """

    def __init__(self, prompt: TokenPrompt | None, recipe: RecipeOutline, reason: str = "") -> None:
        self._prompt = prompt
        self._recipe = recipe
        self._reason = reason
        self._computed_tokens = 0

    def answer(self, answer: Any) -> dict[str, Any]:
        data: dict[str, Any] = answer.model_dump()
        self._end(data)
        self._correct(data["usage"])
        return data

    def events(self, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """Convert a stream. The report is added to the event with the finish reason."""
        return edited_events(events, self._edit, (ENDS, _COUNTS, f'"{_PARAMS}":'))

    def _edit(self, data: dict[str, Any]) -> None:
        if any(choice.get("finish_reason") for choice in data.get("choices", ())):
            self._end(data)
        data.pop(_PARAMS, None)  # vLLM 0.33 adds it to all events
        if usage := data.get("usage"):
            self._correct(usage)

    def _end(self, data: dict[str, Any]) -> None:
        params = data.pop(_PARAMS, None)
        data[FIELD] = self._report(params)

    def _report(self, params: Mapping[str, Any] | None) -> dict[str, Any]:
        if self._prompt is None or not self._prompt.lengths:
            return {"mode": "full", **({"reason": self._reason} if self._reason else {})}
        if params is None:  # An aborted answer has no report.
            return {"mode": "block"}
        served = ServedBlocks.from_dict(params)
        self._computed_tokens = served.encoded_tokens + sum(served.recomputed)
        counts = served.reuse(self._prompt.lengths, len(self._prompt.token_ids))
        return {"mode": "block", **counts, "recipe": str(self._recipe)}

    def _correct(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details")
        if details and details.get("cached_tokens"):
            details["cached_tokens"] = max(details["cached_tokens"] - self._computed_tokens, 0)


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
