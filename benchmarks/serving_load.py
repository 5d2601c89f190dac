"""Shared code of the serving benchmarks: concurrent clients, inter-token latency, machine."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import metadata
from importlib.metadata import packages_distributions
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import machine
from openai_client import Answer

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
"""Environment variables of the servers: one compute thread, not pinned to a core."""


def host() -> dict[str, Any]:
    """Return the machine and the package versions of the run."""
    names = ("vllm", "vllm-cpu")
    version = next(metadata.version(n) for n in names if n in packages_distributions()["vllm"])
    return machine(default_device()) | {"vllm": version}


def write(output: Path | None, result: Mapping[str, Any], table: str) -> None:
    """Write a result as JSON, and its table next to it. If ``output`` is None, do nothing."""
    if output is not None:
        write_json(output, dict(result))
        output.with_suffix(".md").write_text(table, encoding="utf-8")


async def closed_loop(
    asks: Sequence[Callable[[], Awaitable[Answer]]], clients: int
) -> list[Answer]:
    """Run concurrent clients. Each one sends its next question after the previous answer.

    Returns:
        Answers, in the order of the questions.
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
    """Return the gaps between the tokens of answers.

    Returns:
        Gaps during which no other request was waiting for its first token, and all other gaps.
    """
    waits = [(one.sent_s, one.times_s[0]) for one in answers]
    calm: list[float] = []
    disturbed: list[float] = []
    for one in answers:
        for begin, end in pairwise(one.times_s):
            is_disturbed = any(sent < end and first > begin for sent, first in waits)
            (disturbed if is_disturbed else calm).append(end - begin)
    return calm, disturbed
