"""Answers of block mode are compared with full mode in the background, and never wait for it."""

from __future__ import annotations

import gc
import logging
import random
import threading
import time
import weakref
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest
import torch

from blockattn_rag.engine import audit
from blockattn_rag.engine.audit import Auditor, AuditStats
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.results import Certificate
from blockattn_rag.model import BlockModel
from tests.holding import LONGEST_S, holding
from tests.model.families import SUPPORTED
from tests.models import tiny_model, tiny_tokenizer

A = ["Halden is tall.", "It was built in 1931.", "Ferries go.", "How tall?"]
B = ["The lake is deep.", "It lies in the north.", "Who swims there?"]
NEW = 6


def block_model(family: str = "llama") -> BlockModel:
    kind, config = SUPPORTED[family]
    model = BlockModel(tiny_model(kind, **config), tiny_tokenizer())
    model.config.block_attention = {"test": True}  # known to be tuned: no warning
    return model


@pytest.fixture(scope="module")
def model() -> BlockModel:
    return block_model()


@pytest.fixture
def engine(model: BlockModel) -> BlockAttentionEngine:
    return BlockAttentionEngine(model, audit_rate=1)


def finished(engine: BlockAttentionEngine, count: int = 1) -> AuditStats:
    """What the audits have found when so many answers were drawn, and none is pending."""
    until = time.monotonic() + LONGEST_S
    while (found := engine.audits).pending or drawn(found) < count:
        assert time.monotonic() < until, f"not {count} audits ended: {found}"
        time.sleep(0.005)
    assert drawn(found) == count
    return found


def drawn(stats: AuditStats) -> int:
    return stats.audited + stats.dropped + stats.failed


def shares(engine: BlockAttentionEngine, prompts: list[list[str]], new: int) -> list[float]:
    """Of each answer, the share of tokens that one dense forward would choose."""
    found = []
    for prompt in prompts:
        ids = engine.generate(prompt, max_new_tokens=new).token_ids
        chosen = engine.answer_logits(prompt, ids, mode="full").argmax(-1).tolist()
        found.append(sum(map(int.__eq__, chosen, ids)) / len(ids))
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_neox"])
def test_agreement_is_that_of_one_dense_forward_in_full_mode(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_STEP_TOKENS", (5, 7))  # many steps, in prompt and answer
    model = block_model(family)
    prompts = [A, B, ["x", "y", "z"]]
    expected = shares(BlockAttentionEngine(model), prompts, 12)
    assert 0 < sum(expected) < 3
    engine = BlockAttentionEngine(model, audit_rate=1.0)
    for prompt in prompts:
        engine.generate(prompt, max_new_tokens=12)
    found = finished(engine, 3)
    assert found.agreement == pytest.approx(sum(expected) / 3)
    assert found == AuditStats(3, expected.count(1.0), found.agreement)


def test_what_block_mode_computes_exactly_is_identical_and_each_is_told(
    engine: BlockAttentionEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "blockattn_rag")
    engine.generate(["One block.", "Q?"], max_new_tokens=NEW)
    assert finished(engine) == AuditStats(1, 1, 1.0)
    assert "audit: full mode would choose 100.0 % of an answer's 6 tokens" in caplog.messages[-1]
    share = shares(engine, [A], 12)[0]
    assert share < 1
    finished(engine, 2)
    assert f"choose {100 * share:.1f} %" in caplog.messages[-1]
    assert "is the first that it would not" in caplog.messages[-1]


def test_all_ways_to_ask_are_audited(engine: BlockAttentionEngine) -> None:
    engine.generate_batch([A, B], max_new_tokens=NEW)
    assert [*engine.stream(A, max_new_tokens=NEW)][-1].generation is not None
    assert finished(engine, 3).audited == 3
    other = BlockAttentionEngine(engine.model, audit_rate=1)  # over the same model
    other.generate(A, promote=1, max_new_tokens=NEW)
    assert (finished(other).audited, engine.audits.audited) == (1, 3)


def test_only_greedy_answers_of_block_mode_are_audited(engine: BlockAttentionEngine) -> None:
    options: list[dict[str, Any]] = [
        {"mode": "full"},
        {"temperature": 1.0, "seed": 1},
        {"do_sample": True},
        {"repetition_penalty": 1.5},
        {"num_beams": 2},
    ]
    for option in options:
        engine.generate(A, max_new_tokens=NEW, **option)
    engine.generate(["No context."], max_new_tokens=NEW)
    assert finished(engine, 0) == AuditStats()


def test_a_model_whose_own_settings_change_its_logits_is_told_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = block_model()
    model.hf_model.generation_config.repetition_penalty = 1.2
    engine = BlockAttentionEngine(model, audit_rate=1)
    for _ in range(2):
        engine.generate(A, max_new_tokens=NEW)
    assert finished(engine, 0) == AuditStats()
    assert caplog.text.count("audit_rate=1 does nothing for such answers") == 1


def test_an_abstention_and_an_answer_in_full_mode_are_not_audited(
    model: BlockModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blockattn_rag.engine.answer.abstains", lambda *_: True)
    engine = BlockAttentionEngine(model, audit_rate=1)
    engine.generate(A, max_new_tokens=NEW, retry="full")
    assert finished(engine, 0) == AuditStats()
    engine.generate(A, max_new_tokens=NEW, retry="promote:1")
    assert finished(engine).audited == 1


def test_answers_come_between_the_steps_of_an_audit(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_STEP_TOKENS", (5, 5))
    steps: list[str] = []
    running, go_on = threading.Semaphore(0), threading.Semaphore(0)
    original = engine.model.next_logits

    def step(*args: Any) -> Any:
        running.release()
        assert go_on.acquire(timeout=LONGEST_S)
        steps.append("step")
        return original(*args)

    monkeypatch.setattr(engine.model, "next_logits", step)
    engine.generate(A, max_new_tokens=NEW)
    assert running.acquire(timeout=LONGEST_S)
    request = engine.submit(B, mode="full", max_new_tokens=NEW)
    request.answer.add_done_callback(lambda _: steps.append("answer"))
    go_on.release(100)
    request.result(LONGEST_S)
    finished(engine)
    assert steps[:3] == ["step", "answer", "step"]
    assert len(steps) > 10


def test_audits_are_done_one_after_the_other_and_hold_one_prompt(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "_STEP_TOKENS", (5, 5))
    caches: list[Any] = []
    original = engine.model.next_logits

    def step(tokens: Any, cache: Any) -> Any:
        caches.append(cache)
        return original(tokens, cache)

    monkeypatch.setattr(engine.model, "next_logits", step)
    engine.generate_batch([A, B, A], max_new_tokens=NEW)  # one batch, so they wait together
    assert finished(engine, 3).audited == 3
    turns = [len([*steps]) for _, steps in groupby(caches, key=id)]
    assert len(turns) == 3
    assert min(turns) > 5


def test_more_than_a_few_that_wait_are_dropped(engine: BlockAttentionEngine) -> None:
    with holding() as held:
        busy = engine.submit(B, mode="full", max_new_tokens=NEW)
        held.wait_for_token()
        answer = engine.submit(A, max_new_tokens=NEW)
        batch = [engine.submit(A, max_new_tokens=NEW) for _ in range(6)]
        held.let_go()
        for request in (busy, answer, *batch):
            request.result(LONGEST_S)
    found = finished(engine, 7)
    assert (found.audited, found.dropped) == (4, 3)  # one batch, whose answers came at once


def test_an_error_ends_one_audit_and_no_answer(
    engine: BlockAttentionEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "next_logits", fail)
        engine.generate(A, max_new_tokens=NEW)
        assert finished(engine) == AuditStats(failed=1)
    assert "an audit failed: MemoryError('no room')" in caplog.text
    engine.generate(A, max_new_tokens=NEW)
    assert finished(engine, 2).audited == 1


def test_a_model_that_was_set_otherwise_meanwhile_is_not_judged(
    engine: BlockAttentionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine.model.fingerprint
    found = iter([first, "another"])
    with monkeypatch.context() as patch:
        patch.setattr(engine._auditor, "_model", Wrapped(engine.model, found))
        engine.generate(A, max_new_tokens=NEW)
        assert finished(engine) == AuditStats(dropped=1)


class Wrapped:
    """A model with one fingerprint after another."""

    def __init__(self, model: BlockModel, fingerprints: Iterator[str]) -> None:
        self._model = model
        self._fingerprints = fingerprints

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def fingerprint(self) -> str:
        return next(self._fingerprints)


def test_a_model_that_is_trained_meanwhile_is_left_alone(engine: BlockAttentionEngine) -> None:
    with engine.model.lock:
        answer = engine.generate(A, max_new_tokens=NEW)  # audits wait meanwhile
        engine.model.hf_model.train()
    try:
        found = finished(engine)
    finally:
        engine.model.hf_model.eval()
    assert answer.token_ids
    assert found.dropped == 1


def test_answers_are_drawn_by_the_rate(model: BlockModel) -> None:
    def drawn_at(rate: float) -> list[int]:
        """Which of the answers are audited."""
        engine, found = BlockAttentionEngine(model, audit_rate=rate), []
        engine._auditor._draws = random.Random(0)
        for number in range(40):
            engine._auditor._submit = lambda _, number=number: found.append(number)  # type: ignore[misc]
            engine.generate(A, max_new_tokens=1)
        return found

    assert 10 <= len(drawn_at(0.5)) <= 30
    assert (drawn_at(0), drawn_at(1)) == ([], list(range(40)))


def test_each_engine_draws_other_answers_so_that_short_processes_are_audited_too(
    model: BlockModel,
) -> None:
    auditors = [BlockAttentionEngine(model, audit_rate=0.01)._auditor for _ in range(2)]
    one, other = ([auditor._draws.random() for _ in range(8)] for auditor in auditors)
    assert not set(one) & set(other)


@pytest.mark.parametrize("rate", [-0.1, 1.5, "all", True, float("nan")])
def test_another_rate_is_refused(model: BlockModel, rate: Any) -> None:
    with pytest.raises(ValueError, match="audit_rate must be a number from 0 to 1"):
        BlockAttentionEngine(model, audit_rate=rate)


def certificate(agreement: float, low: float) -> Certificate:
    return Certificate(
        5, 50, 0.1, 0.1, 0.1, agreement, low, 1.0, 0.5, 0.4, 0.6, None, None, None, True
    )


def test_agreement_clearly_below_the_certificates_is_warned_of_once_in_a_while(
    model: BlockModel, caplog: pytest.LogCaptureFixture
) -> None:
    auditor = Auditor(model, 1, lambda _: None)
    promised = certificate(0.95, 0.9)
    for found in [0.8, 0.9, 1.0] * 34:  # 0.9 on average
        auditor._compare(found, promised)
    assert not caplog.messages
    for found in [0.7, 0.8, 0.9] * 34:
        auditor._compare(found, promised)
    assert len(caplog.messages) == 2
    assert "is 10.0 percentage points below the certificates" in caplog.messages[-1]


def test_an_engine_whose_audits_are_done_can_go(model: BlockModel) -> None:
    engine = BlockAttentionEngine(model, audit_rate=1)
    engine.generate(A, max_new_tokens=NEW)
    assert finished(engine).audited == 1
    held = weakref.ref(engine._auditor)
    del engine
    until = time.monotonic() + LONGEST_S
    while held() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.005)
    assert held() is None


def test_steps_take_about_as_long_as_they_shall() -> None:
    assert audit._fitting(100, 0.2) == 50
    assert audit._fitting(100, 10.0) == 16
    assert audit._fitting(100, 0.0) == 512


def test_an_audit_draws_nothing(engine: BlockAttentionEngine) -> None:
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    engine.generate(A, max_new_tokens=NEW)
    finished(engine)
    assert torch.equal(torch.get_rng_state(), expected)
