"""What the check of a server asks, and how it compares what it is told."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from blockattn_rag.check.asking import Answer, Asker, Probe
from blockattn_rag.errors import ProtocolError
from blockattn_rag.model import BlockModel
from blockattn_rag.server.client.http import Client
from blockattn_rag.server.client.server import Server
from blockattn_rag.server.served_blocks import ServedBlocks
from tests.models import shared_tiny_llama, tiny_tokenizer
from tests.server.client.fake_server import FakeServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    fake = FakeServer(BlockModel(shared_tiny_llama(), tiny_tokenizer()))
    with fake.listening():
        yield fake


@pytest.fixture
def asker(server: FakeServer) -> Asker:
    return Asker(Server(Client(server.url, None, 60.0, 0), None, tiny_tokenizer(), None))


def probe(seed: int = 1) -> Probe:
    return Probe.drawn(tiny_tokenizer(), random.Random(seed))


def test_a_probe_has_ordinary_tokens_and_is_another_one_each_time() -> None:
    tokenizer = tiny_tokenizer()
    drawn = [probe(seed) for seed in range(8)]
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    assert special
    assert not special & {token for one in drawn for token in one.ids}
    blocks = {tuple(ids) for one in drawn for ids in one.blocks}
    assert len(blocks) == 8 * 3


def test_cuts_of_a_probe_have_the_same_tokens() -> None:
    whole = probe()
    for n in (1, 2, 3):
        cut = whole.cut(n)
        assert cut.ids == whole.ids
        assert cut.blocks == whole.blocks[:n]
    first, second, third = whole.blocks
    assert whole.turned().blocks == [first, third, second]


def test_a_token_that_one_side_does_not_list_counts_as_its_least_likely() -> None:
    answer = Answer((1,), {1: -0.5, 2: -1.0}, 0.0, ServedBlocks(0, 0, 0))
    assert answer.distance({1: -0.5, 2: -1.0}) == 0.0
    assert answer.distance({1: -0.75, 2: -1.0}) == 0.25
    assert answer.distance({1: -0.5, 3: -4.0}) == 3.0  # 2 is at most at -4.0 there


def test_answers_tell_what_was_reused(server: FakeServer, asker: Asker) -> None:
    asked = probe()
    first, again = asker.block(asked), asker.block(asked)
    assert (first.served.encoded, again.served.encoded) == (3, 0)
    assert len(first.tokens) == 8
    assert len(first.likely) == 5
    assert first.likely == again.likely
    assert max(first.likely, key=lambda token: first.likely[token]) == first.tokens[0]
    assert asker.full(asked.ids).distance(first.likely) > 1e-3


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (lambda _: None, "was not computed in block mode"),
        (lambda told: _changed(told, blocks=2), "from 2 blocks of 136 tokens"),
        (lambda told: _changed(told, loaded_tokens=7), "3 blocks of 7 tokens, expected 3 of 136"),
    ],
)
def test_refuses_other_blocks(server: FakeServer, asker: Asker, marker: Any, message: str) -> None:
    server.marker = marker
    with pytest.raises(ProtocolError, match=message):
        asker.block(probe())


def _changed(told: dict[str, Any], **figures: int) -> dict[str, Any]:
    return {"blockattn": {**told["blockattn"], **figures}}


def test_needs_logprobs(server: FakeServer, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockattn_rag.check.asking._ASKED", {})
    with pytest.raises(ProtocolError, match="expected a completion chunk with token_ids"):
        asker.full(probe().ids)
