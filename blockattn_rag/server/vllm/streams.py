"""Streams of answers, whose last piece also tells what became of the prompt's blocks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator

from blockattn_rag.server.vllm.retrying import Ticket

_DATA = "data: "


async def with_marker(
    events: AsyncGenerator[str, None], ticket: Ticket
) -> AsyncGenerator[str, None]:
    """vLLM's events, of which those that end an answer have ``kv_transfer_params``.

    vLLM 0.32 puts them into whole answers alone, later releases also into streams.
    """
    try:
        async for event in events:
            yield _marked(event, ticket) if '"finish_reason":"' in event else event
    finally:
        await events.aclose()


def _marked(event: str, ticket: Ticket) -> str:
    if not event.startswith(_DATA) or ticket.marker is None:
        return event
    told = json.loads(event.removeprefix(_DATA))
    told["kv_transfer_params"] = ticket.marker
    return f"{_DATA}{json.dumps(told, ensure_ascii=False)}\n\n"
