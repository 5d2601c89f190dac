"""The route gives the same answers, blocks and counts as this package's own engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine, MemoryStore
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.prompts.formats import BLANK_LINE
from blockattn_rag.prompts.markers import segment, wrap
from blockattn_rag.store import DirectoryStore
from tests_vllm.reference import Reference
from tests_vllm.server import COMPLETIONS, Answered, Server

TOKENS = 24


@pytest.fixture
def server(team_server: Server) -> Server:
    return team_server


@pytest.fixture
def local(reference: Reference) -> BlockAttentionEngine:
    # Without tails, repeated questions are computed again, as in the counts of the server.
    return BlockAttentionEngine(reference.model, MemoryStore(1 << 28), resident_bytes=0)


def counts(answer: Answered) -> tuple[dict[str, Any], int]:
    report = {name: value for name, value in answer.report.items() if name != "recipe"}
    return report, answer.usage["completion_tokens"]


def assert_same(answer: Answered, generation: Any) -> None:
    assert (answer.tokens, answer.text) == (list(generation.token_ids), generation.text)
    assert answer.reason == generation.finish_reason
    stats = generation.stats
    reuse = stats.reuse() if stats.mode == "block" else {}
    assert counts(answer) == ({"mode": stats.mode, **reuse}, stats.generated_tokens)


@pytest.mark.parametrize("mode", ["block", "full"])
def test_answers_and_counts_equal_those_of_the_local_engine(
    reference: Reference, server: Server, local: BlockAttentionEngine, mode: Any
) -> None:
    # Another file may have stored the usual system text on this server.
    texts = (reference.case(11).texts, reference.case(12, records=2).texts)
    for case in (reference.case_of((f"Read in {mode} mode.\n", *own[1:])) for own in texts):
        for _ in range(2):
            answer = server.ask(case.body(min_tokens=0, blockattn={"mode": mode}))
            assert_same(answer, local.generate(case.prompt, mode=mode, max_new_tokens=TOKENS))
    assert answer.report.get("misses", 0) == 0


def test_texts_of_users_stay_in_memory(
    reference: Reference, server: Server, local: BlockAttentionEngine
) -> None:
    passages = reference.case(17).texts[1:4]
    turn = "A turn of Ms Halden's own, which is nobody's business."
    altered = wrap("Quote: a lake").replace("lake", "pond")
    marked = f"Be brief.{''.join(map(wrap, passages))}{turn}{altered}Question: Who?\nAnswer:"
    prompt = segment(marked, BLANK_LINE)
    store = DirectoryStore(reference.folder / "remote")
    before = {*store.keys()}
    for misses in (6, 0, 0):
        answer = server.ask({"prompt": marked, "max_tokens": TOKENS, "temperature": 0})
        assert_same(answer, local.generate(prompt, max_new_tokens=TOKENS))
        assert answer.report["misses"] == misses
    new = [store.get(key) for key in {*store.keys()} - before]
    ids = [
        reference.model.tokenizer.block_ids(Block(text, BLANK_LINE), first=False)
        for text in passages
    ]
    assert sorted(kv.token_ids.tolist() for kv in new if kv) == sorted(ids)


@pytest.mark.parametrize("mode", ["block", "full"])
def test_stop_strings_end_answers_as_in_process(
    reference: Reference, server: Server, local: BlockAttentionEngine, mode: Any
) -> None:
    case = reference.case(15)
    options: dict[str, Any] = {"mode": mode, "max_new_tokens": TOKENS}
    whole = local.generate(case.prompt, **options)
    stop = [whole.text[12:16]]
    body = case.body(min_tokens=0, stop=stop, blockattn={"mode": mode})
    for _ in range(2):
        answer = server.ask(body)
        expected = local.generate(case.prompt, stop=stop, **options)
        assert (answer.text, answer.reason) == (whole.text[:12], "stop")
        assert expected.text == answer.text
    assert counts(answer)[0] == counts(server.ask(body))[0]
    events = [*server.events(COMPLETIONS, body)]
    assert "".join(one["text"] for event in events for one in event["choices"]) == expected.text
    assert [event["blockattn"] for event in events if "blockattn" in event] == [answer.report]
    if mode == "block":
        assert server.counted("blockattn_cut_answers_total") > 0


def test_streams_and_seeds_give_the_same_text(
    reference: Reference, server: Server, local: BlockAttentionEngine
) -> None:
    case = reference.case(13)
    whole = local.generate(case.prompt, max_new_tokens=TOKENS)
    body = case.body(min_tokens=0, stream_options={"include_usage": True})
    events = [*server.events(COMPLETIONS, body)]
    assert "".join(one["text"] for event in events for one in event["choices"]) == whole.text
    assert len([event for event in events if "blockattn" in event]) == 1
    assert events[-1]["usage"]["prompt_tokens"] == len(case.ids)
    sampled = case.body(temperature=1.0, seed=7)
    assert server.ask(sampled).text == server.ask(sampled).text


def test_passages_are_encoded_once(server: Server, local: BlockAttentionEngine) -> None:
    texts = [f"Passage {number} about a lake and a tower." for number in range(20)]
    client = server.client()
    found = client.encode(texts)
    expected = local.precompute([Block(text, BLANK_LINE) for text in texts])
    assert replace(found, seconds=0.0) == replace(expected, seconds=0.0)
    assert client.encode(texts).reused == 20
    assert client.is_stored(texts[3])
    assert not client.is_stored("Another one.")


def test_server_stores_in_its_namespace(reference: Reference, server: Server) -> None:
    server.client().encode(["Of the team."])
    block = Block("Of the team.", BLANK_LINE)
    key = reference.key(reference.model.tokenizer.block_ids(block, first=False), "team")
    assert key in DirectoryStore(reference.folder / "remote")
