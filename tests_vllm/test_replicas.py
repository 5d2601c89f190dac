"""Two servers with one store reuse each other's passages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle

import pytest

from tests_vllm.reference import SYSTEM, Reference
from tests_vllm.server import Server

QUESTIONS, PASSAGES, PER_PROMPT = 24, 12, 4


@pytest.fixture
def replicas(reference: Reference) -> Iterator[list[Server]]:
    folder = reference.folder
    options = reference.options(store=str(folder / "replicas"))
    servers = [Server(options, folder / f"replica-{number}.log") for number in range(2)]
    try:
        yield [server.wait() for server in servers]
    finally:
        for one in servers:
            one.close()


def test_replicas_share_passages(reference: Reference, replicas: list[Server]) -> None:
    known = [text for number in range(30, 40) for text in reference.case(number).texts[1:-1]]
    known, draw = sorted({*known})[:PASSAGES], random.Random(0)
    heads, known_passages, misses, hits = set[int](), set[str](), 0, 0
    for number, place in zip(range(QUESTIONS), cycle(range(2)), strict=False):
        passages = draw.sample(known, PER_PROMPT)
        case = reference.case_of((SYSTEM, *passages, f"Question: {number}?\nAnswer:"))
        answer = replicas[place].ask(case.body(max_tokens=4, min_tokens=4))
        assert answer.tokens == reference.answer(case, tokens=4)
        # Each server computes the system text, which is not stored, but reuses all passages.
        new = len({*passages} - known_passages) + (place not in heads)
        assert answer.report["misses"] == new
        heads.add(place)
        known_passages |= {*passages}
        misses += answer.report["misses"]
        hits += answer.report["hits"]
    assert misses == len(replicas) + PASSAGES
    assert misses + hits == QUESTIONS * (1 + PER_PROMPT)
