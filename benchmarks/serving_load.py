"""Clients of a server that streams answers, shared by the serving benchmarks.

Times are seconds of one monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from measuring import machine

from blockattn_rag.files import write_json
from blockattn_rag.model.loading import default_device

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(sys.path),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
}
"""Environment of the servers: one compute thread, not bound to a core."""


def host() -> dict[str, Any]:
    """Machine and package versions of the run."""
    names = ("vllm", "vllm-cpu")
    version = next(metadata.version(n) for n in names if n in packages_distributions()["vllm"])
    return machine(default_device()) | {"vllm": version}


def write(output: Path | None, result: Mapping[str, Any], table: str) -> None:
    """Write a result as JSON, and its table next to it. ``output``: None writes nothing."""
    if output is not None:
        write_json(output, dict(result))
        output.with_suffix(".md").write_text(table, encoding="utf-8")


class FailedAnswerError(Exception):
    """The server returned an error. ``status``: HTTP status; None if the stream broke off."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(f"{status or 'a stream'}: {message}")
        self.status = status


@dataclass(slots=True)
class Answer:
    """An answer as received by its client.

    Args:
        sent_s: Time of the request.
        times_s: Time of each token.
        tokens: Token ids.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Prompt tokens that the server did not compute for this answer.
        transfer_params: ``kv_transfer_params`` of the answer.
    """

    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    transfer_params: dict[str, Any] | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.sent_s


async def ask(
    http: httpx.AsyncClient,
    url: str,
    body: dict[str, Any],
    *,
    headers: dict[str, str] | None = None,
    leave_after: int | None = None,
    into: Answer | None = None,
) -> Answer:
    """Stream the answer to a request body.

    Args:
        leave_after: Close the stream after this many tokens.
        into: Answer to fill while tokens arrive, for callers that read it before it is complete.

    Raises:
        FailedAnswerError: The server refused, or the stream broke off.
        httpx.TransportError: The server cannot be reached, or stopped.
    """
    answer = Answer() if into is None else into
    answer.sent_s = time.perf_counter()
    asked = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0,
        **body,
    }
    async with http.stream("POST", url, json=asked, headers=headers) as response:
        if response.is_error:
            raise FailedAnswerError(response.status_code, _reason(await response.aread()))
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(answer, json.loads(line.removeprefix("data: ")))
                if leave_after is not None and len(answer.tokens) >= leave_after:
                    break
    return answer


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if error := event.get("error"):
        raise FailedAnswerError(None, str(error.get("message", error)))
    for choice in event["choices"]:
        new = choice.get("token_ids") or []
        answer.tokens += new
        answer.times_s += [time.perf_counter()] * len(new)
    answer.transfer_params = event.get("kv_transfer_params") or answer.transfer_params
    if usage := event.get("usage"):
        answer.prompt_tokens = usage["prompt_tokens"]
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:500]


async def closed_loop(
    asks: Sequence[Callable[[], Awaitable[Answer]]], clients: int
) -> list[Answer]:
    """Run concurrent clients. Each sends its next question after the answer to the previous one.

    Returns:
        The answers, in the order of the questions.
    """
    waiting = iter(enumerate(asks))
    answers: dict[int, Answer] = {}

    async def client() -> None:
        for place, one in waiting:
            answers[place] = await one()

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return [answers[place] for place in range(len(asks))]


def gaps(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """Gaps between the tokens of answers.

    Returns:
        Gaps during which no other request waited for its first token, and gaps during which one
        did.
    """
    waits = [(one.sent_s, one.times_s[0]) for one in answers]
    calm: list[float] = []
    disturbed: list[float] = []
    for one in answers:
        for begin, end in pairwise(one.times_s):
            is_disturbed = any(sent < end and first > begin for sent, first in waits)
            (disturbed if is_disturbed else calm).append(end - begin)
    return calm, disturbed
