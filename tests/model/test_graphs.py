"""Recorded forwards: replayed on the same memory, they give what the model's own forward gives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.model import BlockModel
from blockattn_rag.model.graphs import BUCKETS, record_graphs
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store import MemoryStore
from tests.models import tiny_model, tiny_tokenizer

FAMILIES = ["llama", "qwen3", "phi3", "gpt_neox"]
CONTEXT = ["You answer. ", "A first passage of some length. ", "A second one. "]


class OperationLog(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stands in for a CUDA graph: does the same operations again, into the same tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, outputs))
        return outputs

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.operations:
            for old, new in zip(
                tree_leaves(outputs), tree_leaves(func(*args, **kwargs)), strict=True
            ):
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)


class LogRecorder:
    """Records operations on the CPU as ``CudaRecorder`` records kernels."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self._log: OperationLog | None = None

    @contextmanager
    def session(self) -> Iterator[None]:
        yield

    def begin(self) -> None:
        self._log = OperationLog()
        self._log.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Callable[[], object]:
        log, self._log = self._log, None
        assert log is not None
        log.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            log.replay()

        return replay


def engine_of(family: str, recorder: LogRecorder | None = None) -> BlockAttentionEngine:
    model = tiny_model(family)
    model.config.block_attention = {"test": True}
    block_model = BlockModel(model, tiny_tokenizer())
    if recorder is not None:
        record_graphs(model, recorder)
    return BlockAttentionEngine(block_model, MemoryStore(1 << 28), assembly="relay")


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_from_records_are_the_models_own(family: str) -> None:
    recorder = LogRecorder()
    own, recorded = engine_of(family), engine_of(family, recorder)
    for question in ("Why?", "What is it that the first passage is about?", "Who?" * 20):
        prompt = [*CONTEXT, question]
        expected = own.generate(prompt, max_new_tokens=8)
        assert recorded.generate(prompt, max_new_tokens=8).token_ids == expected.token_ids
    assert recorder.replayed > 3 * 8


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 64])
def test_padding_to_a_bucket_changes_no_logit(length: int) -> None:
    own, recorded = engine_of("llama").model, engine_of("llama", LogRecorder()).model
    question = torch.arange(20, 20 + length)[None]
    kept: list[tuple[Tensor, Tensor]] = []
    for shift in range(2):  # recorded, then replayed on other tokens
        found, expected = (
            model.next_logits(question + shift, cache_over(model, CONTEXT[shift:]))
            for model in (recorded, own)
        )
        kept.append((found, expected))
    for found, expected in kept:  # the first is not written over by the second
        assert torch.allclose(found, expected, atol=1e-5)


def cache_over(model: BlockModel, texts: list[str]) -> Any:
    engine = BlockAttentionEngine(model, MemoryStore(1 << 28))
    prompt = BlockPrompt.from_texts([*texts, "?"])
    context = engine._runner.prepare(prompt, engine.defaults).context
    assert context is not None
    return model.cache_for(context, assembly="relay")


def test_each_bucket_is_recorded_once() -> None:
    recorder = LogRecorder()
    engine = engine_of("llama", recorder)
    for question in ("abc", "abcde", "abcdefgh"):
        engine.generate([*CONTEXT, question], max_new_tokens=3)
    pieces = engine.model.config.num_hidden_layers + 1
    # The probe of relay attention asks for 7 tokens and for 1; so do these questions and answers.
    assert recorder.recorded == 2 * pieces


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"output_attentions": True, "return_dict_in_generate": True}]
)
def test_what_has_no_record_runs_as_ever(options: dict[str, Any]) -> None:
    recorder = LogRecorder()
    own, recorded = engine_of("llama"), engine_of("llama", recorder)
    expected = own.generate([*CONTEXT, "Why?"], max_new_tokens=5, **options)
    recorded.model.supports_relay  # noqa: B018 -- its probe is replayed
    before = recorder.replayed
    found = recorded.generate([*CONTEXT, "Why?"], max_new_tokens=5, **options)
    assert found.token_ids == expected.token_ids
    assert recorder.replayed == before


def test_batches_full_mode_and_long_questions_run_as_ever() -> None:
    recorder = LogRecorder()
    own, recorded = engine_of("llama"), engine_of("llama", recorder)
    prompts = [[*CONTEXT, "Why?"], [*CONTEXT[1:], "And where is that?"]]
    expected = [answer.token_ids for answer in own.generate_batch(prompts, max_new_tokens=5)]
    found = [answer.token_ids for answer in recorded.generate_batch(prompts, max_new_tokens=5)]
    assert found == expected
    long = [*CONTEXT, "x" * (BUCKETS[-1] + 1)]
    for mode in ("block", "full"):
        answers = [e.generate(long, mode=mode, max_new_tokens=1) for e in (own, recorded)]
        assert answers[0].token_ids == answers[1].token_ids


def test_sampling_and_streaming_go_by_records() -> None:
    own, recorded = engine_of("llama"), engine_of("llama", LogRecorder())
    prompt = [*CONTEXT, "Why?"]
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 1.5, "seed": 3}
    *_, last = recorded.stream(prompt, **options)
    assert last.generation is not None
    assert last.generation.token_ids == own.generate(prompt, **options).token_ids


@pytest.mark.parametrize("piece", [0, 2])
def test_a_model_that_cannot_be_recorded_answers_all_the_same(
    caplog: pytest.LogCaptureFixture, piece: int
) -> None:
    class Refusing(LogRecorder):
        @contextmanager
        def session(self) -> Iterator[None]:
            try:
                yield
            finally:
                if self._log is not None:
                    self.end()

        def end(self) -> Callable[[], object]:
            if self.recorded == piece:
                self.recorded += 1
                raise RuntimeError("operation not permitted when stream is capturing")
            return super().end()

    own, recorded = engine_of("llama"), engine_of("llama", Refusing())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = recorded.generate([*CONTEXT, "Why?"], max_new_tokens=4)
    assert found.token_ids == own.generate([*CONTEXT, "Why?"], max_new_tokens=4).token_ids
    (warning,) = [r for r in caplog.records if "CUDA graphs" in r.getMessage()]
    assert "operation not permitted" in warning.getMessage()


def test_two_engines_over_one_recorded_model_are_both_right() -> None:
    engine = engine_of("llama", LogRecorder())
    other = BlockAttentionEngine(
        BlockModel(engine.model.hf_model, tiny_tokenizer()), MemoryStore(1 << 28), assembly="relay"
    )
    record_graphs(engine.model.hf_model, LogRecorder())  # once is enough
    prompts = [[*CONTEXT, "Why?"], [*CONTEXT[1:], "And where?"]]
    expected = [engine_of("llama").generate(p, max_new_tokens=8).token_ids for p in prompts]
    wrong: list[object] = []

    def ask(asked: BlockAttentionEngine, which: int) -> None:
        for _ in range(6):
            found = asked.generate(prompts[which], max_new_tokens=8).token_ids
            if found != expected[which]:
                wrong.append(found)

    threads = [threading.Thread(target=ask, args=(e, i)) for i, e in enumerate((engine, other))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


@pytest.mark.parametrize("wanted", [torch.tensor([1]), torch.tensor([0, 1]), 2])
def test_other_logits_than_the_last_come_from_the_models_own_forward(wanted: Any) -> None:
    recorder = LogRecorder()
    own, recorded = engine_of("llama").model, engine_of("llama", recorder).model
    ids = torch.arange(20, 25)[None]
    found, expected = (forward_over(model, ids, logits_to_keep=wanted) for model in (recorded, own))
    assert torch.equal(found, expected)


def forward_over(model: BlockModel, ids: Tensor, **options: Any) -> Tensor:
    cache = cache_over(model, CONTEXT)
    with torch.inference_mode():
        logits: Tensor = model.hf_model(input_ids=ids, past_key_values=cache, **options).logits
    return logits


def test_graphs_on_the_cpu_are_refused() -> None:
    with pytest.raises(ValueError, match="need a model on one GPU, whole; this one is on cpu"):
        BlockModel.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer(), cuda_graphs=True)


def _on_cuda(family: str) -> Any:
    model: Any = tiny_model(family)
    return model.to("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_on_cuda_answers_from_graphs_are_the_models_own(family: str) -> None:
    plain, graphed = (
        BlockAttentionEngine.from_pretrained(
            _on_cuda(family), tokenizer=tiny_tokenizer(), cuda_graphs=graphs
        )
        for graphs in (False, True)
    )
    for question in ("Why?", "What is it that the first passage is about?"):
        prompt = [*CONTEXT, question]
        expected = plain.generate(prompt, max_new_tokens=8)
        assert graphed.generate(prompt, max_new_tokens=8).token_ids == expected.token_ids
