"""Two servers over one store: which of them answers does not matter for what is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import cycle

import pytest

from blockattn_rag.server.client import RemoteEngine
from tests_vllm.reference import MODEL, SYSTEM, Reference
from tests_vllm.server import KEY, Server

QUESTIONS, PASSAGES, PER_PROMPT = 24, 12, 4


@pytest.fixture
def replicas(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RemoteEngine]]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = reference.folder
    options = reference.options(store=str(folder / "replicas"))
    servers = [Server(options, folder / f"replica-{number}.log") for number in range(2)]
    try:
        yield [
            RemoteEngine(str(one.wait().http.base_url), tokenizer=MODEL, api_key=KEY)
            for one in servers
        ]
    finally:
        for one in servers:
            one.close()


def test_replicas_share_passages(reference: Reference, replicas: list[RemoteEngine]) -> None:
    known = [text for number in range(30, 40) for text in reference.case(number).texts[1:-1]]
    known, draw = sorted({*known})[:PASSAGES], random.Random(0)
    asked, misses, hits, computed, reused = set[str](), 0, 0, 0, 0
    for number, engine in zip(range(QUESTIONS), cycle(replicas), strict=False):
        passages = draw.sample(known, PER_PROMPT)
        prompt = [SYSTEM, *passages, f"Question: {number}?\nAnswer:"]
        answer = engine.generate(prompt, max_new_tokens=4)
        local = reference.engine.generate(prompt, max_new_tokens=4)
        assert answer.token_ids == local.token_ids
        assert answer.stats.misses == len({SYSTEM, *passages} - asked)
        asked |= {SYSTEM, *passages}
        misses += answer.stats.misses
        hits += answer.stats.hits
        computed += answer.stats.computed_tokens
        reused += answer.stats.reused_tokens
    print(f"{misses} misses, {hits} hits, {computed} tokens computed, {reused} reused")
    assert misses == 1 + PASSAGES
    assert misses + hits == QUESTIONS * (1 + PER_PROMPT)
