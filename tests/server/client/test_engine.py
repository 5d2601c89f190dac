"""A model behind a server answers as one of this process does, or says why not."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag import BlockAttentionEngine, BlockModel, DirectoryStore, MemoryStore
from blockattn_rag.engine.protocol import Engine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation, GenerationChunk
from blockattn_rag.errors import ContextOverflowError, MissError, ProtocolError, ServingError
from blockattn_rag.prompts.blocks import Block, BlockPrompt, Span
from blockattn_rag.server.client import RemoteEngine
from blockattn_rag.server.protocol import COMPLETIONS, ENCODE, INFO
from tests.engines import with_settings
from tests.holding import LONGEST_S
from tests.models import tiny_tokenizer
from tests.recipes import recipe_of
from tests.server.client.conftest import Serve
from tests.server.client.fake_server import EndError, FakeServer, HangupError, RefusalError, fault

A, B, Q = "Halden Tower is 214 metres tall.", "It was built in 1931.", "How tall?"
NEW = 8
COUNTS = ("mode", "hits", "misses", "reused_tokens", "computed_tokens")

PROMPTS: list[Any] = [
    [Q],
    [A, Q],
    [A, B, Q],
    [B, A, B, Q],
    [A, B],
    BlockPrompt((Block(A), Block.of([Span("Between. ", "conversation")]), Block(B)), Q),
    BlockPrompt((Block.of([Span("<|system|>\nBe brief.", "prompt")]), Block(A)), "<|user|>" + Q),
    BlockPrompt((Block(A), Block(B)), ""),
    ["Überall \u2028 Wörter: 你好, 🙂.", "Wie heißt es?"],
]


def alike(found: Generation, expected: Generation) -> None:
    """Two answers are the same, and count the same."""
    assert (found.text, found.token_ids, found.finish_reason) == (
        expected.text, expected.token_ids, expected.finish_reason,
    )  # fmt: skip
    names = (*COUNTS, "generated_tokens", "int8_blocks")
    for name in names:
        assert getattr(found.stats, name) == getattr(expected.stats, name), name


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("mode", ["block", "full"])
def test_answers_and_counts_are_those_of_an_engine_of_this_process(
    engine: RemoteEngine, local: BlockAttentionEngine, prompt: Any, mode: Any
) -> None:
    for _ in range(2):  # computed, then found
        expected = local.generate(prompt, mode=mode, max_new_tokens=NEW)
        alike(engine.generate(prompt, mode=mode, max_new_tokens=NEW), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.5, "seed": 7, "max_new_tokens": 12},
        {"temperature": 1.5, "seed": (1 << 64) - 3, "top_k": 5, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.7, "max_new_tokens": 12},
        {"min_new_tokens": 5, "max_new_tokens": 6},
    ],
)
def test_options_of_sampling_do_there_what_they_do_here(
    engine: RemoteEngine, local: BlockAttentionEngine, options: dict[str, Any]
) -> None:
    options = {"max_new_tokens": NEW, **options}
    if options.get("seed", 0) >= 1 << 63:  # a server knows signed seeds alone
        local_options = {**options, "seed": options["seed"] - (1 << 64)}
    else:
        local_options = options
    alike(engine.generate([A, B, Q], **options), local.generate([A, B, Q], **local_options))


def test_stop_string_ends_the_answer(engine: RemoteEngine, local: BlockAttentionEngine) -> None:
    whole = local.generate([A, Q], temperature=2.0, seed=3, max_new_tokens=30)
    stop = whole.text[4:6]
    found = engine.generate([A, Q], temperature=2.0, seed=3, max_new_tokens=30, stop=[stop])
    assert found.text == whole.text[: whole.text.find(stop)]
    assert found.finish_reason == "stop"
    assert len(found.token_ids) < 30


def test_overlooked_stop_string_is_applied(server: FakeServer, engine: RemoteEngine) -> None:
    options: dict[str, Any] = {"temperature": 2.0, "seed": 3, "max_new_tokens": 30}
    whole = engine.generate([A, Q], **options)
    expected = engine.generate([A, Q], **options, stop=[whole.text[4:6]])
    server.sees_stops = False
    found = engine.generate([A, Q], **options, stop=[whole.text[4:6]])
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    assert found.finish_reason == expected.finish_reason == "stop"


def joined(chunks: list[GenerationChunk]) -> str:
    assert all(chunk.generation is None for chunk in chunks[:-1])
    return "".join(chunk.text for chunk in chunks)


def test_stream_equals_the_local_one(engine: RemoteEngine, local: BlockAttentionEngine) -> None:
    options: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_new_tokens": 20}
    expected = list(local.stream([A, Q], **options))
    found = list(engine.stream([A, Q], **options))
    assert [chunk.text for chunk in found] == [chunk.text for chunk in expected]
    assert found[-1].generation is not None
    assert expected[-1].generation is not None
    alike(found[-1].generation, expected[-1].generation)
    assert joined(found) == found[-1].generation.text


async def test_event_loops_get_the_same(engine: RemoteEngine, local: BlockAttentionEngine) -> None:
    expected = local.generate([A, B, Q], max_new_tokens=NEW)
    prompt = BlockPrompt.from_texts([A, B, Q])
    alike(await engine.agenerate(lambda: prompt, max_new_tokens=NEW), expected)
    chunks = [chunk async for chunk in engine.astream(lambda: prompt, max_new_tokens=NEW)]
    assert joined(chunks) == expected.text


def test_loops_that_come_and_go_share_the_connections(engine: RemoteEngine) -> None:
    texts = [
        asyncio.run(engine.agenerate([A, Q], max_new_tokens=2)).text,
        asyncio.run(engine.agenerate([A, Q], max_new_tokens=2)).text,
        engine.generate([A, Q], max_new_tokens=2).text,
    ]
    assert len(set(texts)) == 1


def test_figures_of_time_add_up(engine: RemoteEngine) -> None:
    stats = engine.generate([A, Q], max_new_tokens=NEW).stats
    assert 0 < stats.fetch_s + stats.prefill_s <= stats.ttft_s <= stats.total_s
    assert stats.assemble_s == 0


# -- leaving ---------------------------------------------------------------------------------


def test_leaving_a_stream_ends_it_at_the_server(server: FakeServer, engine: RemoteEngine) -> None:
    with closing(engine.stream([A, Q], max_new_tokens=3000)) as chunks:
        next(chunks)
    assert server.left.wait(LONGEST_S)
    assert len(engine.generate([A, Q], max_new_tokens=2).token_ids) == 2


async def test_cancelling_ends_the_request(server: FakeServer, engine: RemoteEngine) -> None:
    task = asyncio.create_task(engine.agenerate([A, Q], max_new_tokens=3000))
    while not server.bodies(COMPLETIONS):
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(server.left.wait, LONGEST_S)


async def test_leaving_an_astream_ends_it(server: FakeServer, engine: RemoteEngine) -> None:
    async with aclosing(engine.astream([A, Q], max_new_tokens=3000)) as chunks:
        await anext(chunks)
    assert await asyncio.to_thread(server.left.wait, LONGEST_S)


def test_timeout_leaves_the_request(server: FakeServer, engine: RemoteEngine) -> None:
    pending = engine.submit([A, Q], max_new_tokens=3000)
    while not server.bodies(COMPLETIONS):
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        pending.result(timeout=0.1)
    assert server.left.wait(LONGEST_S)


# -- batches ---------------------------------------------------------------------------------


def test_a_batch_is_answered_in_order_so_many_at_a_time(
    server: FakeServer, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    prompts = [[A, f"Question {n}?"] for n in range(7)]
    found = engine.generate_batch(prompts, batch_size=3, max_new_tokens=3)
    expected = [local.generate(prompt, max_new_tokens=3).text for prompt in prompts]
    assert [one.text for one in found] == expected
    assert 1 < server.most_at_once <= 3


def test_an_error_in_a_batch_drops_the_rest(server: FakeServer, engine: RemoteEngine) -> None:
    server.faults.append(fault(RefusalError(400, "no")))
    with pytest.raises(ServingError, match="answers 400: no"):
        engine.generate_batch([[A, Q]] * 40, batch_size=1, max_new_tokens=1)
    server.wait_for_idleness()
    assert len(server.bodies(COMPLETIONS)) < 40


# -- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        RefusalError(503, "overloaded", {"Retry-After": "0"}),
        RefusalError(500, "Internal server error"),
        RefusalError(429, "too many"),
        HangupError(),
    ],
)
@pytest.mark.parametrize("after", [-1, 0])
def test_a_failure_before_the_first_token_is_tried_once_more(
    server: FakeServer, engine: RemoteEngine, error: Exception, after: int
) -> None:
    server.faults.append(fault(error, after))
    assert len(engine.generate([A, Q], max_new_tokens=NEW).token_ids) == NEW
    assert len(server.bodies(COMPLETIONS)) == 2
    assert len(server.bodies(INFO)) == 2  # it may be another server by then


@pytest.mark.parametrize(
    "error", [RefusalError(500, "Internal server error"), HangupError(), EndError()]
)
def test_late_failure_is_raised(server: FakeServer, engine: RemoteEngine, error: Exception) -> None:
    server.faults.append(fault(error, after=2))
    pieces = []
    with pytest.raises(ServingError, match=server.url):  # noqa: PT012
        for chunk in engine.stream([A, Q], max_new_tokens=NEW):
            pieces.append(chunk.text)
    assert pieces
    assert len(server.bodies(COMPLETIONS)) == 1


def test_as_many_tries_are_made_as_were_asked_for(server: FakeServer) -> None:
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer(), retries=0)
    server.faults.append(fault(RefusalError(503, "overloaded")))
    with pytest.raises(ServingError, match="overloaded"):
        engine.generate([A, Q])
    with pytest.raises(ValueError, match="retries must be an integer of at least 0, found -1"):
        RemoteEngine(server.url, retries=-1)


def test_a_refusal_is_told_and_not_tried_again(server: FakeServer, engine: RemoteEngine) -> None:
    server.faults.append(fault(RefusalError(400, "no such thing")))
    with pytest.raises(ServingError, match="answers 400: no such thing"):
        engine.generate([A, Q])
    assert len(server.bodies(COMPLETIONS)) == 1


def test_a_silent_server_is_given_up(server: FakeServer) -> None:
    def wait(tokens: int) -> None:
        server.left.wait(LONGEST_S)

    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer(), timeout_s=0.2)
    assert engine.info.max_tokens
    server.faults.append(wait)
    try:
        with pytest.raises(ServingError, match=r"sent nothing for 0\.2 seconds.*timeout_s"):
            engine.generate([A, Q])
        assert len(server.bodies(COMPLETIONS)) == 1
    finally:
        server.left.set()
        server.wait_for_idleness()


def test_retry_checks_the_server_again(server: FakeServer, engine: RemoteEngine) -> None:
    def become_another(tokens: int) -> None:
        server.info["tokenizer"] = "0" * 64
        raise RefusalError(503, "restarting")

    server.faults.append(become_another)
    with pytest.raises(ServingError, match=r"the tokenizer .* differs"):
        engine.generate([A, Q])


# -- what the server must be -----------------------------------------------------------------


def test_a_server_without_the_connector_is_refused_before_anything_is_sent(serve: Serve) -> None:
    server = serve(with_connector=False)
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer())
    for ask in (lambda: engine.generate([A, Q]), lambda: engine.encode([A])):
        with pytest.raises(ServingError, match="has no /blockattn/v1/info: this package's"):
            ask()
    assert {path for path, _ in server.requests} == {INFO}


def test_more_blocks_than_a_server_takes_are_refused(server: FakeServer) -> None:
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer())
    with pytest.raises(ValueError, match="found 257 blocks in the prompt, expected at most 256"):
        engine.generate([*(f"passage {place}" for place in range(257)), Q])
    assert server.bodies(COMPLETIONS) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tokenizer", "0" * 64, "the tokenizer .* differs .*as tokenizer="),
        ("v", 2, "Found version 2 of info, expected 1"),
        ("models", ["another"], "has no model 'the-model'; it has another"),
    ],
)
def test_refuses_other_servers(server: FakeServer, field: str, value: Any, message: str) -> None:
    engine = RemoteEngine(server.url, "the-model", tiny_tokenizer())
    server.info[field] = value
    with pytest.raises(ServingError, match=message):
        engine.generate([A, Q])
    assert server.bodies(COMPLETIONS) == []


def test_another_model_of_the_server_is_asked_for_by_its_name(server: FakeServer) -> None:
    RemoteEngine(server.url, "another-model", tiny_tokenizer()).generate([A, Q], max_new_tokens=1)
    assert server.bodies(COMPLETIONS)[0]["model"] == "another-model"


def test_passages_are_encoded_by_the_base_model_whichever_answers(server: FakeServer) -> None:
    engine = RemoteEngine(server.url, "another-model", tiny_tokenizer())
    engine.encode([A])
    assert engine.contains(Block(A))
    assert {body["model"] for body in server.bodies(ENCODE)} == {"the-model"}


def test_a_server_that_may_not_encode_says_what_is_missing(serve: Serve) -> None:
    engine = RemoteEngine(serve(read_only=True).url, tokenizer=tiny_tokenizer())
    with pytest.raises(MissError, match="answers 409: the server is read-only"):
        engine.generate([A, Q])


def test_a_name_that_is_no_tokenizer_asks_for_one(server: FakeServer) -> None:
    with pytest.raises(ServingError, match=r"'the-model', the server's name.*as tokenizer="):
        RemoteEngine(server.url).generate([A, Q])


def test_the_model_tells_its_name_limit_and_fingerprint(
    server: FakeServer, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    assert engine.model.name == "the-model"
    assert engine.model.fingerprint == local.model.fingerprint
    assert engine.model.max_context_tokens == local.model.max_context_tokens
    assert engine.model.tokenizer.fingerprint == local.model.tokenizer.fingerprint
    assert len(server.requests) == 1


def told(**figures: Any) -> Any:
    """The marker of an answer, with other figures."""
    return lambda marker: {"blockattn": {**marker["blockattn"], **figures}}


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        (lambda _: None, "was not computed in block mode"),
        (lambda _: {"another": {}}, "was not computed in block mode"),
        (told(mode="full"), "Found mode 'full' in blockattn, expected 'block'"),
        (told(loaded_tokens=3), "from 2 blocks of 3 tokens, expected 2 of 54"),
        (told(blocks=1), "from 1 blocks of 54 tokens, expected 2 of 54"),
        (told(encoded=1, encoded_tokens=0), "found 1 encoded blocks of 0 tokens"),
        (told(encoded=5), "5 of 2 blocks as encoded"),
        (told(loaded_tokens=0, cut_short=True, encoded=2, encoded_tokens=55), "55 of 54 tokens"),
        (told(loaded_tokens=0, cut_short=True, blocks=1), "from 1 blocks of 54 tokens"),
    ],
)
def test_an_answer_in_another_mode_than_asked_for_is_refused(
    server: FakeServer, engine: RemoteEngine, marker: Any, message: str
) -> None:
    server.marker = marker
    with pytest.raises(ProtocolError, match=message):
        engine.generate([A, B, Q], max_new_tokens=1)


@pytest.mark.parametrize(
    "event",
    [
        *([1], "text", {"choices": None}, {"error": None}, {"error": {"code": [500]}}),
        *({"choices": [{"token_ids": [id_]}]} for id_ in (10**30, -5, "7", True)),
    ],
)
def test_an_event_that_vllm_does_not_write_is_refused(
    server: FakeServer, engine: RemoteEngine, monkeypatch: pytest.MonkeyPatch, event: Any
) -> None:
    monkeypatch.setattr(server, "complete", lambda _path, _body, write: write(event))
    with pytest.raises(ServingError, match=r"a chunk of a completion|answers"):
        engine.generate([A, Q])
    assert len(server.requests) == 2


def test_a_key_is_sent_and_shown_to_nobody(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    server = serve(api_key="the-secret")
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer(), api_key="the-secret")
    assert engine.generate([A, Q], max_new_tokens=1).token_ids
    with pytest.raises(ServingError, match=r"answers 401.*as api_key") as refused:
        RemoteEngine(server.url, tokenizer=tiny_tokenizer(), api_key="a-wrong-one").generate([Q])
    monkeypatch.setenv("BLOCKATTN_RAG_API_KEY", "the-secret")
    by_environment = RemoteEngine(server.url, tokenizer=tiny_tokenizer())
    assert by_environment.generate([A, Q], max_new_tokens=1).token_ids
    shown = repr(engine) + str(refused.value) + caplog.text
    assert "the-secret" not in shown
    assert "a-wrong-one" not in shown


# -- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": Recipe(promote=1)}, "found recipe promote:1, but .* has the recipe none"),
        ({"recipe": Recipe(positions="composite")}, "found recipe positions:composite"),
        ({"recipe": "no/such"}, "Found no recipe at no/such"),
        ({"num_beams": 2}, "found num_beams, which servers do not support.*repetition_penalty"),
        ({"recipe": "head:4"}, "found recipe head:4, but .* has the recipe none; use"),
    ],
)
def test_what_a_server_cannot_do_is_refused_before_it_is_asked(
    server: FakeServer, engine: RemoteEngine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate([A, Q], **options)
    assert server.bodies(COMPLETIONS) == []


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        ([A, Q], {"max_new_tokens": 0}),
        ([A, Q], {"temperature": -1}),
        ([A, Q], {"mode": "both"}),
        ([A, Q], {"stop": [""]}),
        ([A, Q], {"input_ids": [1]}),
        ([], {}),
        ("one text", {}),
        ([A, Block(Q)], {}),
    ],
)
def test_bad_arguments_raise_what_an_engine_of_this_process_raises(
    engine: RemoteEngine, local: BlockAttentionEngine, prompt: Any, options: Any
) -> None:
    engines: list[Engine] = [local, engine]
    raised = []
    for one in engines:
        for ask in (one.generate, lambda *a, one=one, **o: list(one.stream(*a, **o))):
            with pytest.raises((ValueError, TypeError)) as error:
                ask(prompt, **options)
            raised.append((type(error.value), str(error.value)))
    assert len(set(raised)) == 1


def test_too_long_prompt_is_refused(engine: RemoteEngine, local: BlockAttentionEngine) -> None:
    engines: list[Engine] = [local, engine]
    messages = set()
    for one in engines:
        with pytest.raises(ContextOverflowError) as error:
            one.generate(["x" * 3000, "y" * 1200, Q])
        messages.add(str(error.value))
    assert len(messages) == 1


def test_an_answer_ends_where_the_window_does(serve: Serve) -> None:
    server = serve(max_tokens=50)
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer())
    answer = engine.generate([A, Q], max_new_tokens=1000)
    assert answer.stats.prompt_tokens + answer.stats.generated_tokens == 50
    assert answer.finish_reason == "length"


def test_what_is_not_stored_may_be_an_error(
    server: FakeServer, engine: RemoteEngine, local: BlockAttentionEngine
) -> None:
    engine = RemoteEngine(server.url, tokenizer=engine.model.tokenizer, on_miss="error")
    local = with_settings(local, on_miss="error")
    head = Block.of([Span("Answer from this.", "conversation")])  # of which nothing is promised
    prompt = BlockPrompt((head, Block(A), Block(B)), Q)
    engines: list[Engine] = [local, engine]
    messages = set()
    for one in engines:
        one.encode([A])
        with pytest.raises(MissError, match=r"1 of 3 blocks .* the first is 'It was") as error:
            one.generate(prompt)
        messages.add(str(error.value))
        one.encode([B])
        assert one.generate(prompt, max_new_tokens=1).token_ids
    assert len(messages) == 1
    assert len(server.bodies(COMPLETIONS)) == 1
    assert sum("only_look" in body for body in server.bodies(ENCODE)) == 4


def test_stores_what_a_local_does(serve: Serve, block_model: BlockModel, tmp_path: Path) -> None:
    here, there = DirectoryStore(tmp_path / "here"), DirectoryStore(tmp_path / "there")
    server = serve(store=there)
    engines: list[Engine] = [
        BlockAttentionEngine(block_model, here),
        RemoteEngine(server.url, tokenizer=tiny_tokenizer()),
    ]
    spans = [("Be brief. ", "system"), ("Earlier turn.", "conversation"), (A, "altered")]
    head, turn, altered = (Block.of([Span(text, origin)]) for text, origin in spans)  # type: ignore[arg-type]
    context = (head, Block(A), turn, altered, Block(B))
    expected: list[tuple[str, ...]] = [("memory", "store", "private", "private", "store")]
    expected += [("store", *expected[0][1:])] * 2  # a system message that comes again
    finals = ("1", "2", "3")  # no final block begins like another: no tail is taken
    for final, stored, keep in zip(finals, (2, 3, 3), expected, strict=True):
        prompt = BlockPrompt(context, final)
        alike(*(one.generate(prompt, max_new_tokens=NEW) for one in reversed(engines)))
        assert sorted(here.keys()) == sorted(there.keys())
        assert len(list(there.keys())) == stored
        (told,) = server.bodies(COMPLETIONS)[-1]["kv_transfer_params"].values()
        assert tuple(told["keep"]) == keep
    for one in engines:
        assert not one.contains(turn)
        one.encode([turn])  # on purpose
        assert one.contains(turn)
        assert not one.contains(Block(turn.text)), "it is found by private blocks alone"
    assert sorted(here.keys()) == sorted(there.keys())
    assert len(list(there.keys())) == 4


def test_untuned_warning(serve: Serve, block_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    repaired = serve(block_tuned=False, recipe=recipe_of(block_model))
    RemoteEngine(repaired.url, tokenizer=tiny_tokenizer()).generate([A, Q], max_new_tokens=1)
    engine = RemoteEngine(serve(block_tuned=False).url, tokenizer=tiny_tokenizer())
    engine.generate([A, Q], mode="full", max_new_tokens=1)
    assert caplog.text == ""
    for _ in range(2):
        engine.generate([A, Q], max_new_tokens=1)
    assert caplog.text.count("is not known to be block-fine-tuned") == 1


@pytest.mark.parametrize("name", ["bos", "head:4", "adapter", "adapter without sink"])
def test_server_recipe_equals_local_recipe(serve: Serve, block_model: Any, name: str) -> None:
    sinks = {"adapter": "head:4", "adapter without sink": "none"}
    recipe = recipe_of(block_model, sink=sinks[name]) if name in sinks else Recipe(name)
    engine = RemoteEngine(serve(recipe=recipe).url, tokenizer=tiny_tokenizer())
    local = BlockAttentionEngine(block_model, recipe=recipe)
    assert (str(engine.recipe), engine.recipe.encoding) == (str(recipe), recipe.encoding)
    engines: list[Engine] = [local, engine]
    for one in engines:
        one.encode([A])
        one.encode(BlockPrompt((Block("A head."),), Q))
    for prompt in (["A head.", A, B, Q], ["Another head.", B, A, Q]):
        alike(
            engine.generate(prompt, recipe=recipe, max_new_tokens=NEW),
            local.generate(prompt, max_new_tokens=NEW),
        )


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("has_head", [True, False])
def test_promotes_as_local_one(serve: Serve, block_model: Any, count: int, has_head: bool) -> None:
    recipe = recipe_of(block_model, promote=count)
    server = serve(recipe=recipe)
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer())
    local = BlockAttentionEngine(block_model, MemoryStore(1 << 28), recipe=recipe, resident_bytes=0)
    head = [Block.of([Span("A head.", "system")])] if has_head else []
    for passages in ([A, B, "Who built it?"], [B, A], [A, A], [A]):
        prompt = BlockPrompt((*head, *map(Block, passages)), Q)
        for _ in range(2):
            found = engine.generate(prompt, max_new_tokens=NEW)
            expected = local.generate(prompt, max_new_tokens=NEW)
            assert found.token_ids == expected.token_ids
            assert found.stats.reuse() == expected.stats.reuse()
            assert found.stats.recipe == expected.stats.recipe == str(recipe)
            params = server.bodies(COMPLETIONS)[-1].get("kv_transfer_params")
            blocks = len(params["blockattn"]["lengths"]) if params else 0
            assert blocks == has_head + max(len(passages) - count, 0)
    found = engine.generate(BlockPrompt((*head,), Q), max_new_tokens=NEW)
    assert found.token_ids == local.generate(BlockPrompt((*head,), Q), max_new_tokens=NEW).token_ids


def test_refuses_a_recipe_that_changes_between_tries(serve: Serve, block_model: Any) -> None:
    server = serve(recipe=Recipe(promote=1))
    engine = RemoteEngine(server.url, tokenizer=tiny_tokenizer())

    def restart(_: int) -> None:
        server.info["promote"] = 2
        raise RefusalError(503, "restarting")

    server.faults.append(restart)
    with pytest.raises(ServingError, match="changed from promote 1 to promote 2"):
        engine.generate([A, B, Q], max_new_tokens=1)
    assert engine.generate([A, B, Q], max_new_tokens=1).stats.recipe == "promote 2"
