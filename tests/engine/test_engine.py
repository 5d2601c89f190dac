"""The engine: exact reuse, statistics, batches, and streams."""

from __future__ import annotations

import gc
import hashlib
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from blockattn_rag.check.oracle import oracle_generate
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.pending import Group
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ContextOverflowError, MissError, UnsupportedModelError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block, BlockPrompt
from blockattn_rag.prompts.markers import segment, wrap
from blockattn_rag.prompts.sinks import sink_ids
from blockattn_rag.store import MemoryStore
from tests.engines import outcome, tuned_model, with_settings
from tests.holding import FEW, LONGEST_S, Held
from tests.model.miniatures import new_model
from tests.models import tiny_tokenizer

A, B, Q = "Halden Tower is 214 metres tall.", "It was built in 1931.", "How tall?"
NEW = 6


def oracle(
    model: BlockModel, prompt: BlockPrompt | list[str], new: int = NEW, before: Sequence[int] = ()
) -> list[int]:
    if not isinstance(prompt, BlockPrompt):
        prompt = BlockPrompt.from_texts(prompt)
    ids = model.tokenizer.prompt_ids(prompt)
    ends = sorted(model.end_token_ids)
    return oracle_generate(model.hf_model, [*ids.context, ids.final], new, ends, before)


def contents(engine: BlockAttentionEngine) -> dict[str, str]:
    """Hashes of the entries in the store, by key."""

    def digest(kv: BlockKV | None) -> str:
        assert kv is not None
        states = b"".join(t.numpy().tobytes() for t in (*kv.keys, *kv.values, kv.token_ids))
        return hashlib.sha256(states).hexdigest()

    return {key: digest(engine.store.get(key)) for key in list(engine.store.keys())}


def test_statistics_count_reused_and_computed_blocks_and_tokens(model: BlockModel) -> None:
    engine = BlockAttentionEngine(model, resident_bytes=0)  # no tails
    prompt = ["first", A, B, A, Q]
    cold = engine.generate(prompt, max_new_tokens=NEW).stats
    # "first" includes BOS; the second A reuses the first one.
    context = len("first") + 1 + 2 * len(A) + len(B)
    assert (cold.hits, cold.misses) == (1, 3)
    assert (cold.reused_tokens, cold.computed_tokens) == (len(A), context - len(A) + len(Q))
    warm = engine.generate(prompt, max_new_tokens=NEW).stats
    assert (warm.hits, warm.misses) == (4, 0)
    assert (warm.reused_tokens, warm.computed_tokens) == (context, len(Q))
    assert warm.prompt_tokens == cold.prompt_tokens == context + len(Q)
    assert warm.generated_tokens == NEW
    full = engine.generate(prompt, mode="full", max_new_tokens=NEW).stats
    assert (full.mode, full.hits, full.misses, full.reused_tokens) == ("full", 0, 0, 0)
    assert full.computed_tokens == context + len(Q)


def test_encode_refuses_single_strings_and_empty_texts(engine: BlockAttentionEngine) -> None:
    with pytest.raises(TypeError, match=r"pass \[text\]"):
        engine.encode("one text")
    with pytest.raises(ValueError, match="empty"):
        engine.encode([""])
    assert engine.encode([]) == []


def test_on_miss_error_only_answers_from_stored_blocks(engine: BlockAttentionEngine) -> None:
    strict = with_settings(engine, on_miss="error")
    with pytest.raises(MissError, match="2 of 2 blocks"):
        strict.generate([A, B, Q], max_new_tokens=1)
    engine.generate([A, B, Q], max_new_tokens=1)
    answer = strict.generate([A, B, Q], max_new_tokens=NEW)
    assert answer.token_ids == oracle(engine.model, [A, B, Q])


def test_positions_override_those_of_the_recipe(model: BlockModel) -> None:
    engine = BlockAttentionEngine(model, positions="composite", assembly="copy")
    composite = engine.generate([A, B, Q], max_new_tokens=NEW).token_ids
    plain = BlockAttentionEngine(model).generate([A, B, Q], max_new_tokens=NEW).token_ids
    assert plain == oracle(model, [A, B, Q]) != composite
    assert engine.recipe == Recipe(positions="composite")
    unknown: Any = ""
    with pytest.raises(ValueError, match="Invalid positions ''"):
        BlockAttentionEngine(model, positions=unknown)


def test_unknown_settings_are_refused(engine: BlockAttentionEngine) -> None:
    for name in ("on_miss", "assembly"):
        with pytest.raises(ValueError, match=f"Unknown {name} 'nonsense': expected"):
            with_settings(engine, **{name: "nonsense"})
    mode: Any = "nonsense"
    with pytest.raises(ValueError, match="Unknown mode 'nonsense': expected 'block' or 'full'"):
        engine.generate([A, Q], mode=mode)
    with pytest.raises(ValueError, match="Unknown mode"):
        engine.stream([A, Q], mode=mode)


def test_blocks_encoded_after_different_sinks_are_different_entries(model: BlockModel) -> None:
    engine = BlockAttentionEngine(model, MemoryStore(1 << 28), recipe="head:4")
    plain = BlockAttentionEngine(model, engine.store)
    handles = plain.encode([A, B])
    assert not engine.contains(Block(A))
    assert engine.encode([A, B]) == handles
    assert engine.contains(Block(A))
    assert len(list(engine.store.keys())) == 4
    assert plain.precompute([Block(A), Block("new")], recipe="head:4").reused == 1
    prompt = ["the head", A, B, Q]
    answers = [
        engine.generate(prompt, max_new_tokens=NEW, recipe=one) for one in (None, "none", "bos")
    ]
    assert [(a.stats.hits, a.stats.misses) for a in answers] == [(2, 1), (3, 0), (1, 2)]
    before = sink_ids("head:4", model.tokenizer)
    assert answers[0].token_ids == oracle(model, prompt, before=before)
    assert answers[1].token_ids == oracle(model, prompt)
    with pytest.raises(ValueError, match="Found no recipe at heads"):
        engine.generate(prompt, recipe="heads")
    with pytest.raises(ValueError, match="Found no recipe at tail:1"):
        BlockAttentionEngine(model, recipe="tail:1")


def test_a_block_that_only_fits_without_its_sink_is_refused(small: BlockAttentionEngine) -> None:
    room = small.model.max_context_tokens
    with pytest.raises(ContextOverflowError, match=r"A block has \d+ tokens after a sink of 4 tok"):
        small.encode(["x" * (room - 3)], recipe="head:4")


def test_relay_is_refused_by_models_that_do_not_support_it(engine: BlockAttentionEngine) -> None:
    hf_model = new_model("windows").hf_model
    hf_model.register_parameter("sinks", nn.Parameter(torch.zeros(4)))  # in no layer
    other = BlockAttentionEngine(BlockModel(hf_model, tiny_tokenizer(), pack_weights=False))
    with pytest.raises(UnsupportedModelError, match="cannot use assembly='relay'"):
        with_settings(other, assembly="relay")
    assert other.generate([A, Q], max_new_tokens=1).token_ids


def test_an_empty_final_text_makes_the_last_block_final(engine: BlockAttentionEngine) -> None:
    prompt = BlockPrompt((Block(A), Block(B)), "")
    answer = engine.generate(prompt, max_new_tokens=NEW)
    assert answer.token_ids == oracle(engine.model, [A, B])
    stats = answer.stats
    assert (stats.hits, stats.misses) == (0, 1)
    assert (stats.reused_tokens, stats.computed_tokens) == (0, len(A) + 1 + len(B))
    full = engine.generate(prompt, mode="full", max_new_tokens=NEW).stats
    assert full.prompt_tokens == stats.prompt_tokens
    only = engine.generate(BlockPrompt((Block(A),), ""), max_new_tokens=NEW)
    assert only.token_ids == oracle(engine.model, [A])


def test_empty_texts_before_the_final_one_are_dropped(engine: BlockAttentionEngine) -> None:
    answer = engine.generate(["", A, "", Q], max_new_tokens=NEW)
    assert answer.token_ids == oracle(engine.model, [A, Q])
    with pytest.raises(ValueError, match="The prompt is empty"):
        engine.generate(["", ""])


def test_stray_markers_do_not_change_the_answer(engine: BlockAttentionEngine) -> None:
    plain = engine.generate(["S", A, B, Q], max_new_tokens=NEW)
    stale = wrap("something else").replace("something else", A)
    orphan = wrap("something else").partition("something else")[0]
    for marked in (f"S{wrap(A)}\n{wrap(B)}{Q}", f"S{stale}{wrap(B)}{Q}{orphan}"):
        assert engine.generate(segment(marked), max_new_tokens=NEW).token_ids == plain.token_ids


@pytest.mark.parametrize("assembly", ["copy", "relay"])
def test_stored_tensors_are_never_written(engine: BlockAttentionEngine, assembly: Any) -> None:
    prompts = [[A, Q], [A, B, Q], [B, A, A, Q], [B, Q]]
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=1)
    before = contents(engine)
    engine = with_settings(engine, assembly=assembly)
    composite = {"recipe": Recipe(positions="composite")}
    ways: list[dict[str, Any]] = [{}, {"num_beams": 2}, {"temperature": 1.0}, composite]
    for options in ways:
        for prompt in prompts:
            engine.generate(prompt, max_new_tokens=NEW, **options)
    engine.generate_batch(prompts, max_new_tokens=NEW)
    assert contents(engine) == before


# -- the window ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small() -> BlockAttentionEngine:
    return BlockAttentionEngine(tuned_model(max_position_embeddings=64))


@pytest.mark.parametrize("mode", ["block", "full"])
def test_window_caps_new_tokens(small: BlockAttentionEngine, mode: Any) -> None:
    # 40 + 20 + BOS leave 3 tokens of the window of 64.
    answer = small.generate(["x" * 40, "y" * 20], mode=mode, max_new_tokens=50)
    assert len(answer.token_ids) == 3
    assert answer.finish_reason == "length"
    with pytest.raises(
        ContextOverflowError, match="has 64 tokens, but the model accepts at most 64"
    ):
        small.generate(["x" * 40, "y" * 23], mode=mode)
    with pytest.raises(ContextOverflowError):
        small.generate_batch([["x", "y"], ["x" * 40, "y" * 23]], mode=mode, max_new_tokens=1)
    other = threading.Thread(target=lambda: small.generate(["x"], max_new_tokens=1), daemon=True)
    other.start()  # another thread, because the lock is reentrant
    other.join(LONGEST_S)
    assert not other.is_alive()


def test_window_limits_apply_to_each_row_of_a_batch(small: BlockAttentionEngine) -> None:
    prompts = [["x" * 40, "y" * 20], ["x", "y"]]
    answers = small.generate_batch(prompts, max_new_tokens=8)
    assert [len(answer.token_ids) for answer in answers] == [3, 8]


def test_the_error_for_too_long_blocks_gives_advice(small: BlockAttentionEngine) -> None:
    with pytest.raises(ContextOverflowError, match="split the passage"):
        small.encode(["x" * 70])
    with pytest.raises(ContextOverflowError, match="fewer or shorter passages"):
        small.generate(["x" * 70, "y"])


def test_a_prompt_that_is_too_long_stores_nothing(
    small: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(small.store.keys())
    monkeypatch.setattr(small.model, "encode", lambda *_, **__: pytest.fail("computed"))
    with pytest.raises(ContextOverflowError):
        small.generate([*(f"passage number {i}" for i in range(9)), "y"])
    assert set(small.store.keys()) == before


# -- batches ---------------------------------------------------------------------------------------


def test_every_row_of_a_batch_has_its_own_statistics(engine: BlockAttentionEngine) -> None:
    prompts = [["first", A, Q], [Q], ["first", A, B, Q]]
    answers = engine.generate_batch(prompts, max_new_tokens=NEW, batch_size=2)
    assert [(a.stats.hits, a.stats.misses) for a in answers] == [(0, 2), (0, 0), (2, 1)]
    assert [a.stats.generated_tokens for a in answers] == [len(a.token_ids) for a in answers]
    assert [a.token_ids for a in answers] == [oracle(engine.model, p) for p in prompts]
    assert engine.generate_batch([]) == []


@pytest.mark.parametrize("mode", ["block", "full"])
def test_only_the_first_of_several_sequences_is_used(
    engine: BlockAttentionEngine, mode: str
) -> None:
    config = GenerationConfig(num_return_sequences=2, do_sample=True)  # type: ignore[no-untyped-call]
    options: dict[str, Any] = {"mode": mode, "do_sample": True, "generation_config": config}
    assert engine.generate([A, Q], max_new_tokens=NEW, **options).token_ids


@pytest.mark.parametrize("size", [0, -1, 2.5, 4.0, "2", None])
def test_batch_size_must_be_positive(engine: BlockAttentionEngine, size: Any) -> None:
    with pytest.raises(ValueError, match=f"Invalid batch_size {size!r}: expected an integer"):
        engine.generate_batch([[A, Q]], batch_size=size)


def test_an_abandoned_batch_ends_after_its_step(engine: BlockAttentionEngine, held: Held) -> None:
    group = Group(None, calls=2, at_once=2)
    prompts = [["a", "b"], ["c", "d"]]
    pending = [engine.submit(prompt, group=group, max_new_tokens=3500) for prompt in prompts]
    held.wait_for_token()
    pending[0].leave()
    held.let_go(1)  # one request remains
    while held.tokens < 2:
        time.sleep(0.001)
    pending[1].leave()
    held.wait_for_end()
    held.let_go()
    assert engine.generate([A, Q], max_new_tokens=NEW).token_ids == oracle(engine.model, [A, Q])
    assert held.tokens == 2 + NEW


def test_a_waiting_request_needs_no_engine(engine: BlockAttentionEngine, held: Held) -> None:
    first = engine.submit([A, Q], max_new_tokens=NEW)
    held.wait_for_token()  # the model is paused, so new requests have to wait
    other = BlockAttentionEngine(engine.model)
    waiting, reference = other.submit([B, Q], max_new_tokens=NEW), weakref.ref(other)
    del other
    gc.collect()
    assert reference() is None
    held.let_go()
    assert waiting.result(LONGEST_S).token_ids == oracle(engine.model, [B, Q])
    assert first.result(LONGEST_S).token_ids == oracle(engine.model, [A, Q])


@pytest.mark.parametrize(
    ("place", "batch_tokens"),
    [
        ("BlockModel.encode", 4096),
        ("BlockModel.generate_batch", 1),  # too few for two rows, so each is answered alone
        ("BlockModel.generate_batch", 4096),
    ],
)
def test_an_interrupt_ends_a_whole_batch_at_once(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch, place: str, batch_tokens: int
) -> None:
    interrupt = Mock(side_effect=KeyboardInterrupt)
    prompts = [[f"passage {number}", "question"] for number in range(3)]
    with monkeypatch.context() as patch:
        patch.setattr(f"blockattn_rag.model.block_model.{place}", interrupt)
        patch.setattr(BlockModel, "batch_tokens", batch_tokens)
        with pytest.raises(KeyboardInterrupt):
            engine.generate_batch(prompts, max_new_tokens=2)
    interrupt.assert_called_once()
    answers = engine.generate_batch(prompts, max_new_tokens=2)
    assert [answer.token_ids for answer in answers] == [
        oracle(engine.model, prompt, 2) for prompt in prompts
    ]


def test_prompts_with_many_tokens_to_compute_run_in_smaller_batches(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch, batch_sizes: list[int]
) -> None:
    prompts = [["a" * n, "b" * 9] for n in (5, 5, 30, 5)]
    expected = [a.token_ids for a in engine.generate_batch(prompts, max_new_tokens=2, mode="full")]
    batch_sizes.clear()
    monkeypatch.setattr(BlockModel, "batch_tokens", 40)
    found = engine.generate_batch(prompts, max_new_tokens=2, mode="full")
    assert [answer.token_ids for answer in found] == expected
    assert batch_sizes == [2]  # the other two ran alone


def test_answer_time_starts_at_the_call(engine: BlockAttentionEngine, held: Held) -> None:
    first = engine.submit([A, Q], max_new_tokens=NEW)
    held.wait_for_token()
    second = engine.submit([B, Q], max_new_tokens=NEW)
    time.sleep(0.06)
    held.let_go()
    first.result(LONGEST_S)
    assert second.result(LONGEST_S).stats.ttft_s > 0.05


@pytest.mark.parametrize(
    "options", [{"stop": ["<|user|>"], "pad_token_id": 65}, {"eos_token_id": None}]
)
def test_each_row_ends_as_if_alone(engine: BlockAttentionEngine, options: dict[str, Any]) -> None:
    prompts = [[f"prompt {n} {'x' * n}"] for n in range(12)]
    alone = [engine.generate(prompt, max_new_tokens=60, **options) for prompt in prompts]
    batch = engine.generate_batch(prompts, max_new_tokens=60, **options)
    assert [*map(outcome, batch)] == [*map(outcome, alone)]


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"mode": "full"}])
def test_stream_adds_up_to_answer(engine: BlockAttentionEngine, options: dict[str, Any]) -> None:
    whole = engine.generate([A, Q], max_new_tokens=20, **options)
    chunks = list(engine.stream([A, Q], max_new_tokens=20, **options))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.generation is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1].generation is not None
    assert chunks[-1].generation.token_ids == whole.token_ids


def test_an_abandoned_stream_frees_the_model(engine: BlockAttentionEngine, held: Held) -> None:
    stream = engine.stream([A, Q], max_new_tokens=3500)
    held.let_go(FEW)
    next(stream)
    stream.close()
    held.wait_for_end()
    assert held.tokens <= FEW + 1
    held.let_go()
    assert engine.generate([A, Q], max_new_tokens=NEW).token_ids == oracle(engine.model, [A, Q])


def test_stream_error_reaches_reader_and_frees_model(engine: BlockAttentionEngine) -> None:
    with pytest.raises(ValueError, match="not used by the model"):
        list(engine.stream([A, Q], no_such_option=1))
    with pytest.raises(MissError):
        list(with_settings(engine, on_miss="error").stream(["never seen", Q]))
    assert engine.generate([Q], max_new_tokens=1).token_ids


def test_engines_that_share_a_model_reproduce_seeded_answers(
    model: BlockModel, batch_sizes: list[int]
) -> None:
    engines = [BlockAttentionEngine(model), BlockAttentionEngine(model)]
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 12}
    asked = [(engine, seed) for engine in engines for seed in range(6)]
    alone = [engine.generate([A, Q], seed=seed, **options).token_ids for engine, seed in asked]
    with ThreadPoolExecutor(4) as pool:
        futures = [
            pool.submit(engine.generate, [A, Q], seed=seed, **options) for engine, seed in asked
        ]
        found = [future.result().token_ids for future in futures]
    assert found == alone
    assert batch_sizes == []
