"""Ingestion through a server: what is encoded, what was there, and what an interruption leaves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.errors import ContextOverflowError, ProtocolError, ServingError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.client import ingest as ingestion
from blockattn_rag.server.client.ingest import AT_ONCE, ToEncode, batches
from blockattn_rag.server.protocol import ENCODE
from blockattn_rag.store.namespaces import OPEN
from blockattn_rag.store.passage_index import PassageIndex
from tests.models import tiny_tokenizer
from tests.server.client.conftest import Serve
from tests.server.client.fake_server import FakeServer, RefusalError, fault

BLOCKS = [Block(f"Passage {n} of a few words.") for n in range(20)]


def figures(stats: EncodeStats) -> EncodeStats:
    return replace(stats, seconds=0.0)


def test_what_is_encoded_and_counted_is_what_an_engine_of_this_process_would(
    engine: RemoteEngine, local: BlockAttentionEngine, server: FakeServer
) -> None:
    first, second = [*BLOCKS[:4], BLOCKS[1]], BLOCKS[2:8]
    for blocks in (first, second, [], [BLOCKS[0]]):
        found = engine.precompute(blocks)
        assert figures(found) == figures(local.precompute(blocks))
        assert found.seconds > 0 or not blocks
    assert sorted(server.store.keys()) == sorted(local.store.keys())
    assert engine.encode(["One text.", BLOCKS[0]]) == local.encode(["One text.", BLOCKS[0]])
    for wrong, kind in (("One text.", "str"), (3, "int")):
        with pytest.raises(TypeError, match=f"encode expects a list of texts, found {kind}"):
            engine.encode(wrong)  # type: ignore[arg-type]


def test_the_first_block_of_a_prompt_is_stored_as_such(
    engine: RemoteEngine, local: BlockAttentionEngine, server: FakeServer
) -> None:
    prompt = BlockPrompt((BLOCKS[0], BLOCKS[1], BLOCKS[0]), "A question?")
    assert not engine.contains(BLOCKS[0], first=True)
    assert engine.encode(prompt) == local.encode(prompt)
    assert sorted(server.store.keys()) == sorted(local.store.keys())
    assert engine.contains(BLOCKS[0], first=True)
    assert engine.contains(BLOCKS[0])
    assert not engine.contains(BLOCKS[1], first=True)
    assert not engine.contains(BLOCKS[2])
    assert len(list(server.store.keys())) == 3  # to look encodes nothing


def test_encoded_passages_are_recognized_in_plain_text(
    engine: RemoteEngine, local: BlockAttentionEngine, server: FakeServer
) -> None:
    long = [f"Passage {n}, whose text is long enough for the index." for n in range(4)]
    spoken = [Block.of([Span(f"{long[n]} So {n} said.", "conversation")]) for n in range(2)]
    blocks = [*map(Block, long[:2]), *spoken, BLOCKS[0], Block(f"\n{long[1]}")]
    prompt = BlockPrompt((Block(f"{long[2]} It opens a prompt."), Block(long[3])), "A question?")
    for one in (engine, local):
        one.precompute(blocks)
        one.encode(prompt)
    text = [Span(" - ".join([*long, *(one.text for one in [*spoken, *blocks])]), "conversation")]
    for store in (server.store, local.store):
        spans = PassageIndex(store).split(text, OPEN)
        assert {span.text for span in spans if span.origin == "passage"} == {*long[:2], long[3]}


def test_progress_is_told_and_shown(
    engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ingestion, "_BATCH_BLOCKS", 6)
    seen: list[tuple[int, int]] = []
    engine.precompute(BLOCKS, on_progress=lambda *done: seen.append(done), show_progress=True)
    tokens = sum(len(engine.model.tokenised(block, False).ids) for block in BLOCKS)
    assert [total for _, total in seen] == [tokens] * 5
    assert sorted(done for done, _ in seen) == [done for done, _ in seen]
    assert (seen[0], seen[-1]) == ((0, tokens), (tokens, tokens))
    assert f"{tokens}/{tokens}" in capfd.readouterr().err


def test_concurrent_requests_are_bounded(engine: RemoteEngine, server: FakeServer) -> None:
    blocks = [Block(f"Number {n}.") for n in range(60)]
    engine.precompute(blocks, batch_tokens=25)
    bodies = server.bodies(ENCODE)
    assert all(sum(map(len, body["blocks"])) <= 25 for body in bodies)
    assert sum(len(body["blocks"]) for body in bodies) == 60
    assert 1 < server.most_at_once <= AT_ONCE


def test_a_block_longer_than_a_request_has_one_of_its_own() -> None:
    blocks = [ToEncode([1] * 5), ToEncode([2] * 50), ToEncode([3] * 5)]
    bodies = list(batches(blocks, as_prompt=False, batch_tokens=20))
    assert [len(body.blocks) for body in bodies] == [1, 1, 1]


def test_an_interrupted_run_goes_on_where_it_stopped(
    engine: RemoteEngine, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingestion, "_BATCH_BLOCKS", 2)
    monkeypatch.setattr(ingestion, "AT_ONCE", 1)
    server.faults += [None, None, fault(RefusalError(400, "no"))]
    with pytest.raises(ServingError, match="answers 400: no"):
        engine.precompute(BLOCKS)
    assert len(list(server.store.keys())) == 4
    asked = len(server.bodies(ENCODE))
    assert asked == 3  # nothing more after the failure
    stats = engine.precompute(BLOCKS)
    assert (stats.reused, stats.computed) == (4, 16)


def test_a_failure_that_passes_loses_nothing(engine: RemoteEngine, server: FakeServer) -> None:
    server.faults.append(fault(RefusalError(503, "overloaded")))
    assert engine.precompute(BLOCKS).computed == 20


def test_a_read_only_server_encodes_nothing(serve: Serve, block_model: Any) -> None:
    server = serve(read_only=True)
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match=r"20 of 20 blocks are not in the store.*is read-only"):
        engine.precompute(BLOCKS)
    local = BlockAttentionEngine(block_model, server.store)
    local.precompute(BLOCKS)
    assert engine.precompute(BLOCKS).reused == 20


def test_too_long_block_is_refused_first(engine: RemoteEngine, server: FakeServer) -> None:
    with pytest.raises(ContextOverflowError, match="has 5000 tokens, but the model accepts"):
        engine.precompute([BLOCKS[0], Block("x" * 5000)])
    assert server.bodies(ENCODE) == []


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"blocks": ["found"], "stored_bytes": 0}, "answered for 1 blocks, expected 2"),
        ({"blocks": ["found", "missing"], "stored_bytes": 0}, "did not encode all blocks"),
        ({"blocks": ["found", "there"], "stored_bytes": 0}, "should be 'found', 'encoded' or"),
        ("not JSON", "answer should be an object, found 'not JSON'"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(
    engine: RemoteEngine,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    told: Any,
    message: str,
) -> None:
    monkeypatch.setattr(server, "encode", lambda *_: told)
    with pytest.raises(ProtocolError, match=message):
        engine.precompute(BLOCKS[:2])


def test_looking_is_not_encoding(
    engine: RemoteEngine, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "encode", lambda *_: {"blocks": ["encoded"], "stored_bytes": 1})
    with pytest.raises(ProtocolError, match="encoded blocks that it should only look up"):
        engine.contains(BLOCKS[0])
