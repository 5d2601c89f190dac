"""One rank with concurrent loads, chunks of 32 tokens and a small cache."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.server.keys import salt
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.store import DirectoryStore
from tests_vllm.connectors import GATE
from tests_vllm.engines import Engine, running, sampling_of
from tests_vllm.reference import Reference, assert_close

PAGE = 128
PAGES = 20


@contextmanager
def slow_engine(options: dict[str, Any], gate: Path, ranks: int = 1) -> Iterator[Engine]:
    """Run an engine with a small cache, whose steps have fewer tokens than most prompts."""
    more: dict[str, Any] = {
        "max_num_batched_tokens": 32,
        "num_gpu_blocks_override": PAGES,
        "max_model_len": 1024,
    }
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(GATE, str(gate))
        more |= {"module": "tests_vllm.connectors", "name": "SlowConnector"}
        with running(options, tensor_parallel_size=ranks, **more) as engine:
            yield engine


@pytest.fixture(scope="module")
def gate(reference: Reference) -> Path:
    return reference.folder / "gate"


@pytest.fixture(scope="module")
def engine(reference: Reference, gate: Path) -> Iterator[Engine]:
    with slow_engine(reference.options(), gate) as engine:
        yield engine


@pytest.fixture(scope="module")
def recipe() -> Recipe | None:
    """Recipe of the engine. None: The recipe of the local engine."""
    return None


def free_pages_are_all(engine: Engine) -> bool:
    """Whether all pages are free. After a failure, this may only be true after the next answer."""
    engine.ask([5, 6, 7], max_tokens=1)
    return engine.counted("vllm:kv_cache_usage_perc") == 0.0


def test_answers_equal_those_of_the_local_engine(reference: Reference, engine: Engine) -> None:
    for place in range(3):
        case = reference.telling(place)
        said = engine.block(case)
        assert said.tokens == reference.answer(case)
        assert said.blocks["blocks"] == len(case.lengths)
        assert said.blocks["loaded_tokens"] + said.blocks["local_tokens"] == sum(case.lengths)


@pytest.mark.parametrize("beyond", [0, 1, PAGE - 1])
def test_a_context_may_end_within_a_page(reference: Reference, engine: Engine, beyond: int) -> None:
    pad = (beyond - sum(reference.case(6, records=3).lengths)) % PAGE
    case = reference.stored(reference.case(6, records=3, pad=pad))
    assert reference.answer(case) != reference.answer(case, recipe=Recipe(positions="composite"))
    assert sum(case.lengths) % PAGE == beyond
    assert engine.block(case).tokens == reference.answer(case)


def test_pages_of_the_two_modes_are_separate(reference: Reference, engine: Engine) -> None:
    case = reference.telling(3)
    block, full = reference.answer(case), reference.answer(case, "full")
    assert [engine.block(case).tokens, engine.full(case).tokens] == [block, full]
    again = engine.block(case)
    assert again.tokens == block
    assert again.blocks["local_tokens"] >= PAGE
    assert engine.full(case).tokens == full


def test_differently_split_prompts_have_their_own_pages(
    reference: Reference, engine: Engine
) -> None:
    case = reference.telling(4)
    whole = reference.stored(case._replace(lengths=(sum(case.lengths),)))
    # With a single context block, block mode equals full mode.
    for _ in range(2):
        assert engine.block(whole).tokens == reference.answer(case, "full")
        assert engine.block(case).tokens == reference.answer(case)


def test_clients_cannot_use_salts_of_block_mode(reference: Reference, engine: Engine) -> None:
    case = reference.telling(5)
    own = salt(BlockPlan("complete", case.lengths, keep=case.keep), reference.profile)
    outputs = engine.llm.generate(
        [{"prompt_token_ids": case.ids, "cache_salt": own}], [sampling_of(None)], use_tqdm=False
    )
    assert list(outputs[0].outputs[0].token_ids) == reference.answer(case, "full")
    said = engine.block(case)
    assert said.tokens == reference.answer(case)
    assert said.blocks["local_tokens"] == 0


def test_salts_of_clients_separate_pages(reference: Reference, engine: Engine) -> None:
    case = reference.telling(5)
    engine.block(case)
    for least, most in ((0, 0), (PAGE, sum(case.lengths))):
        (output,) = engine.llm.generate(
            [{"prompt_token_ids": case.ids, "cache_salt": "own"}],
            [sampling_of(case.params)],
            use_tqdm=False,
        )
        assert list(output.outputs[0].token_ids) == reference.answer(case)
        assert output.kv_transfer_params is not None
        assert least <= output.kv_transfer_params["blockattn"]["local_tokens"] <= most


def test_concurrent_requests_share_pages_where_allowed(
    reference: Reference, engine: Engine, recipe: Recipe | None
) -> None:
    cases = [reference.telling(place % 7) for place in range(16)]
    asked = [(one.ids, one.params if place % 3 else None) for place, one in enumerate(cases)]
    expected = [
        reference.answer(one, "block" if place % 3 else "full", recipe=recipe)
        for place, one in enumerate(cases)
    ]
    assert [said.tokens for said in engine.ask_all(asked)] == expected


def test_preempted_requests_continue(
    reference: Reference, engine: Engine, recipe: Recipe | None
) -> None:
    cases = [reference.telling(place) for place in range(4)]
    expected = [reference.answer(case, tokens=200, recipe=recipe) for case in cases]
    before = engine.counted("vllm:num_preemptions")
    said = engine.ask_all([(case.ids, case.params) for case in cases], max_tokens=200)
    assert engine.counted("vllm:num_preemptions") > before
    assert [one.tokens for one in said] == expected
    assert free_pages_are_all(engine)


def test_two_answers_to_one_prompt_are_both_correct(
    reference: Reference, engine: Engine, recipe: Recipe | None
) -> None:
    case = reference.telling(6)
    (output,) = engine.llm.generate(
        [{"prompt_token_ids": case.ids}],
        [sampling_of(case.params, n=2, temperature=1.0, top_k=1)],
        use_tqdm=False,
    )
    expected = reference.answer(case, recipe=recipe)
    assert [list(one.token_ids) for one in output.outputs] == [expected] * 2


def test_a_missing_block_only_fails_its_request(
    reference: Reference, engine: Engine, recipe: Recipe | None
) -> None:
    missing, case = reference.case(50, records=2), reference.telling(3)
    failed = engine.counted("vllm:blockattn_load_failures")
    bad, good = engine.ask_all([(missing.ids, missing.params), (case.ids, case.params)])
    assert bad.reason == "error"
    assert good.tokens == reference.answer(case, recipe=recipe)
    assert engine.full(missing).tokens == reference.answer(missing, "full")
    ranks = engine.llm.llm_engine.vllm_config.parallel_config.world_size
    assert engine.counted("vllm:blockattn_load_failures") - failed == ranks
    assert free_pages_are_all(engine)


def test_damaged_entries_are_not_used(reference: Reference, engine: Engine) -> None:
    store = DirectoryStore(reference.store)
    cut = reference.stored(reference.case(36))
    (path,) = reference.store.rglob(f"*{reference.key(cut.blocks[1])}*")
    path.write_bytes(path.read_bytes()[:-100])
    assert engine.block(cut).reason == "error"
    foreign = reference.case(37)
    for block in foreign.blocks[1:]:  # all prompts share the system message
        other = replace(reference.encoded(block[::-1]), digest=reference.encoded(block).digest)
        store.put(reference.key(block), other)
    assert engine.block(foreign).reason == "error"
    case = reference.stored(reference.case(2))
    assert engine.block(case).tokens == reference.answer(case)
    assert free_pages_are_all(engine)


def test_a_recovered_store_is_used_within_a_second(reference: Reference, engine: Engine) -> None:
    case = reference.stored(reference.case(45, records=2))
    objects = DirectoryStore(reference.store).entry_path("0" * 64).parents[1]
    objects.rename(reference.folder / "away")
    objects.write_text("no folder")
    for _ in range(4):
        assert engine.block(case).reason == "error"
    objects.unlink()
    (reference.folder / "away").rename(objects)
    time.sleep(1)
    assert engine.block(case).tokens == reference.answer(case)


def test_an_aborted_load_frees_its_pages(
    reference: Reference, engine: Engine, gate: Path, recipe: Recipe | None
) -> None:
    case = reference.telling(5)
    before = engine.counted("vllm:blockattn_recomputed_tokens")
    gate.touch()
    try:
        engine.add("left", case.ids, case.params)
        engine.add("other", case.ids[:40], None)
        # The other request runs and ends while the load is waiting.
        assert engine.first_to_end() == "other"
    finally:
        engine.leave("left")
        gate.unlink()
    said = engine.block(case)
    assert said.tokens == reference.answer(case, recipe=recipe)
    counted = engine.counted("vllm:blockattn_recomputed_tokens")
    assert counted == before + sum(said.blocks["recomputed"])
    assert free_pages_are_all(engine)


def test_invalid_plans_fail(reference: Reference, engine: Engine) -> None:
    case = reference.case(1)
    assert engine.ask(case.ids, BlockPlan("complete", (10_000,)).to_dict()).reason == "error"
    forged = BlockPlan("complete", (3,), "other-tenant").to_dict("another secret")
    assert engine.ask(case.ids, forged).reason == "error"
    assert engine.full(case).tokens == reference.answer(case, "full")
    assert free_pages_are_all(engine)


def test_prompt_logprobs_are_refused_in_block_mode(reference: Reference, engine: Engine) -> None:
    case = reference.stored(reference.case(1))
    refused = engine.counted("vllm:blockattn_refused")
    assert engine.block(case, prompt_logprobs=1).reason == "error"
    assert engine.counted("vllm:blockattn_refused") == refused + 1
    assert engine.block(case).tokens == reference.answer(case)


def test_an_encoded_block_is_a_hit_for_all_engines(reference: Reference, engine: Engine) -> None:
    case = reference.case(44)
    store = DirectoryStore(reference.store)
    for block in case.blocks:
        if reference.key(block) not in store:
            engine.encode([block])
    for block in case.blocks:
        assert_close(reference.written(block), reference.encoded(block))
    hits = reference.engine.generate(case.prompt, max_new_tokens=4).stats
    assert hits.misses <= 1  # the system message has a private key
    assert engine.block(case).tokens == reference.answer(case)
