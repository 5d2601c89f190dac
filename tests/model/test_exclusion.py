"""A model runs one call at a time, and seeded sampling excludes other sampling in the process."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LogitsProcessor

from blockattn_rag.model import BlockModel, EncodeRequest, exclusion
from blockattn_rag.model.sampling import Sampling
from tests.models import shared_tiny_llama, tiny_model, tiny_tokenizer

IDS = list(range(40, 60))
LONG = 60.0
"""Seconds after which a hanging test fails. Tests never depend on the exact value."""


@pytest.fixture
def model() -> BlockModel:
    return BlockModel(copy.deepcopy(shared_tiny_llama()), tiny_tokenizer())


def other_model() -> BlockModel:
    return BlockModel(tiny_model(seed=1), tiny_tokenizer())


def sampled(model: BlockModel, seed: int | None, **calls: Any) -> list[int]:
    return model.generate([], IDS, Sampling(8, temperature=2.0, seed=seed), **calls)


class InThread:
    """Runs a call in a new thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.ended = threading.Event()
        self._call = call
        self.result: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self.result = self._call()
        self.ended.set()

    def join(self) -> Any:
        assert self.ended.wait(LONG), "the call did not end"
        return self.result


def test_wrappers_of_the_same_model_share_its_lock(model: BlockModel) -> None:
    same = BlockModel(model.hf_model, tiny_tokenizer())
    wrapped: Any = get_peft_model(model.hf_model, LoraConfig(r=2, target_modules=["k_proj"]))
    assert same.lock is model.lock is BlockModel(wrapped, tiny_tokenizer()).lock
    assert other_model().lock is not model.lock


CALLS: dict[str, Callable[[BlockModel], Any]] = {
    "generate": lambda m: m.generate([], IDS, Sampling(2)),
    "generate_batch": lambda m: m.generate_batch([([], IDS), ([], IDS[:5])], Sampling(2)),
    "encode": lambda m: list(m.encode([EncodeRequest(IDS, "", "")])),
    "next_logits": lambda m: m.next_logits(torch.tensor([IDS])),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_calls_wait_for_the_model(model: BlockModel, call: Callable[[BlockModel], Any]) -> None:
    other = BlockModel(model.hf_model, tiny_tokenizer())
    other.fingerprint  # noqa: B018 -- measured before the model is busy
    waiting: list[InThread] = []
    intruded = threading.Event()
    hf_model: Any = model.hf_model

    def note(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            intruded.set()

    def on_token(_: int) -> None:
        if not waiting:
            waiting.append(InThread(lambda: call(other)))
            # Without the lock, the other call would run during this wait.
            intruded.wait(0.5)
            in_between.append(intruded.is_set())

    in_between: list[bool] = []
    handle = hf_model.model.register_forward_pre_hook(note)
    model.generate([], IDS, Sampling(4), on_token=on_token)
    waiting[0].join()
    handle.remove()
    assert in_between == [False]
    assert intruded.is_set()


def test_a_processor_may_call_the_model_that_runs_it(model: BlockModel) -> None:
    class Asks(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Tensor) -> Any:
            ids = model.generate([], input_ids[0].tolist()[-4:], Sampling(1))
            scores[:, ids[0]] += 1.0
            return scores

    sampling = Sampling(4, extra={"logits_processor": [Asks()]})
    run = InThread(lambda: model.generate([], IDS, sampling))
    assert run.join() == model.generate([], IDS, sampling)


@pytest.mark.parametrize("other_seed", [None, 7], ids=["unseeded", "seeded"])
def test_concurrent_draws_keep_seeded_answers(model: BlockModel, other_seed: int | None) -> None:
    other = other_model()
    alone, expected = sampled(model, 5), sampled(other, 7)
    intruder: list[InThread] = []
    has_drawn, ended = threading.Event(), threading.Event()

    def hold(_: int) -> None:
        has_drawn.set()
        ended.wait(0.5)

    def on_token(_: int) -> None:
        if not intruder:
            intruder.append(InThread(lambda: sampled(other, other_seed, on_token=hold)))
            has_drawn.wait(0.5)  # without the lock, it would draw now

    assert sampled(model, 5, on_token=on_token) == alone
    ended.set()
    found = intruder[0].join()
    assert other_seed is None or found == expected


@pytest.mark.parametrize(
    ("seed", "sampling"),
    [(None, Sampling(2, temperature=2.0)), (3, Sampling(2))],
    ids=["unseeded", "greedy"],
)
def test_unseeded_draws_and_greedy_answers_do_not_wait(
    model: BlockModel, seed: int | None, sampling: Sampling
) -> None:
    other = other_model()

    def on_token(_: int) -> None:
        assert InThread(lambda: other.generate([], IDS, sampling)).join()

    assert sampled(model, seed, on_token=on_token)


def test_nested_seeded_answers_do_not_affect_each_other(model: BlockModel) -> None:
    other = other_model()
    alone, inner = sampled(model, 3), sampled(other, 4)
    found: list[list[int]] = []

    def run() -> list[int]:
        return sampled(model, 3, on_token=lambda _: found.append(sampled(other, 4)))

    assert InThread(run).join() == alone
    assert found == [inner] * len(alone)


def test_a_seeded_run_that_waits_to_draw_does_not_lock_its_model(model: BlockModel) -> None:
    other = other_model()
    is_drawing, may_ask = threading.Event(), threading.Event()

    class Asks(LogitsProcessor):
        """Calls the other model, as contrastive decoding does."""

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            is_drawing.set()
            assert may_ask.wait(LONG)
            other.next_logits(torch.tensor([IDS]))
            return scores

    sampling = Sampling(2, temperature=2.0, extra={"logits_processor": [Asks()]})
    asking = InThread(lambda: model.generate([], IDS, sampling))
    assert is_drawing.wait(LONG)
    seeded = InThread(lambda: sampled(other, seed=1))
    while not exclusion._draws._waiting:  # until it waits for exclusive access
        time.sleep(0.001)
    may_ask.set()
    asking.join()
    assert seeded.join() == sampled(other, seed=1)
