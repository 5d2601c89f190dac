"""This package's client asks vLLM, and gets what its own engine answers."""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.errors import ServingError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.store import DirectoryStore
from tests_vllm.reference import MODEL, Reference
from tests_vllm.server import KEY, Server

NAMES = ("mode", "hits", "misses", "reused_tokens", "computed_tokens", "generated_tokens")


@pytest.fixture
def server(team_server: Server) -> Server:
    return team_server


@pytest.fixture
def local(reference: Reference) -> BlockAttentionEngine:
    # It keeps no tails: what is asked again is computed again, as figures of servers tell.
    return BlockAttentionEngine(reference.model, MemoryStore(1 << 28), resident_bytes=0)


@pytest.mark.parametrize("mode", ["block", "full"])
def test_answers_and_counts_are_those_of_the_local_engine(
    reference: Reference, engine: RemoteEngine, local: BlockAttentionEngine, mode: str
) -> None:
    options: dict[str, Any] = {"mode": mode, "max_new_tokens": 24}
    for case in (reference.case(11), reference.case(12, records=2)):
        for _ in range(2):
            found = engine.generate(list(case.texts), **options)
            expected = local.generate(list(case.texts), **options)
            assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
            assert found.finish_reason == expected.finish_reason
            counts = [getattr(found.stats, name) for name in NAMES]
            assert counts == [getattr(expected.stats, name) for name in NAMES]
    assert found.stats.misses == 0


def test_what_users_write_is_kept_in_memory_as_here(
    reference: Reference, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    passages = [Block(text) for text in reference.case(17).texts[1:4]]
    turn = "A turn of Ms Halden's own, which is nobody's business."
    spans = [("Be brief.\n", "system"), (turn, "conversation"), ("Quote: a lake", "altered")]
    head, *others = (Block.of([Span(text, origin)]) for text, origin in spans)  # type: ignore[arg-type]
    prompt = BlockPrompt((head, *passages, *others), "Question: Who?\nAnswer:")
    before = {*DirectoryStore(reference.folder / "remote").keys()}
    for misses in (6, 0, 0):
        found, expected = (one.generate(prompt, max_new_tokens=24) for one in (engine, local))
        assert found.token_ids == expected.token_ids
        assert found.stats.misses == expected.stats.misses == misses
    stored, until = DirectoryStore(reference.folder / "remote"), time.monotonic() + 30
    # A system message that comes a second time is stored beside the answer.
    while not engine.contains(head, first=True) and time.monotonic() < until:
        time.sleep(0.05)
    new = [stored.get(key) for key in {*stored.keys()} - before]
    tokenizer = reference.model.tokenizer
    texts = [tokenizer.block_ids(block, first=block is head) for block in (head, *passages)]
    assert sorted(kv.token_ids.tolist() for kv in new if kv) == sorted(texts)


@pytest.mark.parametrize("mode", ["block", "full"])
def test_stop_strings_end_answers_where_they_do_here(
    reference: Reference, engine: RemoteEngine, local: BlockAttentionEngine, mode: str
) -> None:
    texts = list(reference.case(15).texts)
    options: dict[str, Any] = {"mode": mode, "max_new_tokens": 24}
    whole = local.generate(texts, **options)
    options["stop"] = [whole.text[12:16]]
    for _ in range(2):
        found, expected = engine.generate(texts, **options), local.generate(texts, **options)
        assert (found.text, found.token_ids) == (whole.text[:12], expected.token_ids)
        assert found.finish_reason == "stop"
    counts = [getattr(found.stats, name) for name in NAMES]
    assert counts == [getattr(expected.stats, name) for name in NAMES]
    assert "".join(one.text for one in engine.stream(texts, **options)) == expected.text


def test_streams_and_seeds_do_as_here(
    reference: Reference, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    texts = list(reference.case(13).texts)
    whole = local.generate(texts, max_new_tokens=24)
    pieces = list(engine.stream(texts, max_new_tokens=24))
    assert "".join(one.text for one in pieces) == whole.text
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_new_tokens": 12}
    assert engine.generate(texts, **sampled).text == engine.generate(texts, **sampled).text


def test_many_ask_at_once(
    reference: Reference, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    prompts = [list(reference.case(20 + n).texts) for n in range(6)]
    expected = [local.generate(one, max_new_tokens=12).text for one in prompts]
    found = engine.generate_batch(prompts, max_new_tokens=12)
    assert [one.text for one in found] == expected

    async def ask() -> list[str]:
        answers = (engine.agenerate(one, max_new_tokens=12) for one in prompts)
        return [one.text for one in await asyncio.gather(*answers)]

    assert asyncio.run(ask()) == expected


def test_a_stream_that_is_left_ends_there(reference: Reference, engine: RemoteEngine) -> None:
    texts = list(reference.case(14).texts)
    with closing(engine.stream(texts, max_new_tokens=1500, ignore_eos=True)) as pieces:
        next(pieces)
    assert engine.generate(texts, max_new_tokens=4).token_ids


def test_passages_are_encoded_once(engine: RemoteEngine, local: BlockAttentionEngine) -> None:
    blocks = [Block(f"Passage {n} about a lake and a tower.") for n in range(20)]
    found, expected = engine.precompute(blocks), local.precompute(blocks)
    assert replace(found, seconds=0.0) == replace(expected, seconds=0.0)
    assert engine.precompute(blocks).reused == 20
    assert engine.contains(blocks[3])
    assert not engine.contains(Block("Another one."))
    head = BlockPrompt((Block("A head."),), "?")
    engine.encode(head)
    assert engine.contains(head.context[0], first=True)


def test_server_stores_in_its_namespace(reference: Reference, engine: RemoteEngine) -> None:
    block = Block("Of the team.")
    engine.precompute([block])
    key = reference.key(list(engine.model.tokenised(block, False).ids), "team")
    assert key in DirectoryStore(reference.folder / "remote")


def test_another_tokenizer_and_a_wrong_key_are_refused(server: Server) -> None:
    url = str(server.http.base_url)
    with pytest.raises(ServingError, match="401"):
        RemoteEngine(url, tokenizer=MODEL, api_key="wrong").generate(["A", "Q"])
    with pytest.raises(ServingError, match="has no model"):
        RemoteEngine(url, "another", MODEL, api_key=KEY).generate(["A", "Q"])
