"""The student: block mode with a trainable correction, and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.lab.repair.closed_form import no_correction
from blockattn_rag.lab.repair.student import BlockSource, ReadyPrompt, Student
from blockattn_rag.model import BlockModel
from blockattn_rag.store import MemoryStore
from tests.lab.repair.runs import PROMPT, block_model

ANSWER = [70, 90, 100, 65]
SINK = "head:4"


@pytest.fixture(scope="module")
def model() -> BlockModel:
    model = block_model()
    model.hf_model.requires_grad_(False)
    return model


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(1 << 30)


@pytest.fixture
def ready(model: BlockModel, store: MemoryStore) -> ReadyPrompt:
    return BlockSource(model, store, SINK)(PROMPT)


def new_student(model: BlockModel) -> Student:
    return Student(model, no_correction(model, SINK))


def test_untrained_student_is_block_mode(model: BlockModel, ready: ReadyPrompt) -> None:
    found = new_student(model)(ready, ANSWER)
    expected = BlockAttentionEngine(model, recipe=SINK).answer_logits(PROMPT, ANSWER)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error.item() < 1e-4  # the tolerance for float32


def test_gradients_reach_adapter(model: BlockModel, store: MemoryStore, ready: ReadyPrompt) -> None:
    before = {key: store.get(key) for key in store.keys()}  # noqa: SIM118 - a store is no dict
    copies = {key: [t.clone() for t in (*kv.keys, *kv.values)] for key, kv in before.items() if kv}
    assert len(copies) == 4  # the system message and three passages
    student = new_student(model)
    student(ready, ANSWER).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in student.parameters())
    assert all(p.grad is None for p in model.hf_model.parameters())
    torch.optim.SGD(student.parameters(), lr=1.0).step()
    again = BlockSource(model, MemoryStore(1 << 30), SINK)(PROMPT)
    fresh = {block.kv.key: block.kv for block in again.context.blocks}
    for key, tensors in copies.items():
        kv = store.get(key)
        assert kv is not None
        for tensor, kept, new in zip(
            tensors, (*kv.keys, *kv.values), (*fresh[key].keys, *fresh[key].values), strict=True
        ):
            assert torch.equal(tensor, kept)
            assert torch.equal(tensor, new)


def test_gradients_equal_finite_differences(model: BlockModel, ready: ReadyPrompt) -> None:
    student = new_student(model)
    generator = torch.Generator().manual_seed(0)
    step = [torch.randn(p.shape, generator=generator) for p in student.parameters()]
    with torch.no_grad():
        for parameter, part in zip(student.parameters(), step, strict=True):
            parameter.add_(0.1 * part)

    def loss() -> torch.Tensor:
        logits: torch.Tensor = student(ready, ANSWER)
        return logits.log_softmax(-1)[:, 7].mean()

    loss().backward()  # type: ignore[no-untyped-call]
    trained: list[Any] = list(student.parameters())
    slope = sum(float((p.grad * d).sum()) for p, d in zip(trained, step, strict=True))
    size, values = 1e-3, []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, part in zip(student.parameters(), step, strict=True):
                parameter.add_(sign * size * part)
            values.append(loss().double())
            for parameter, part in zip(student.parameters(), step, strict=True):
                parameter.sub_(sign * size * part)
    measured = (values[0] - values[1]).item() / (2 * size)
    # float32 rounding of about 1e-6 over a step of 1e-3, and a curvature term of the same order.
    assert float(slope) == pytest.approx(measured, rel=0.02, abs=5e-3)


def test_the_parameters_of_the_student_exclude_the_model(model: BlockModel) -> None:
    student = new_student(model)
    layers = no_correction(model, SINK).layers
    expected = sum(tensor.numel() for layer in layers for tensor in layer)
    assert sum(tensor.numel() for tensor in student.state_dict().values()) == expected
    assert all(name.startswith("trained.") for name in student.state_dict())


def test_a_trained_correction_equals_the_encoded_one(model: BlockModel, ready: ReadyPrompt) -> None:
    student = new_student(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    found = student(ready, ANSWER).detach()
    adapter = student.finished()
    assert not any(tensor.requires_grad for layer in adapter.layers for tensor in layer)
    stock = BlockAttentionEngine(model, recipe=SINK).answer_logits(PROMPT, ANSWER)
    trained = Recipe(SINK, adapter, fingerprints=(model.fingerprint,))
    expected = BlockAttentionEngine(model, recipe=trained).answer_logits(PROMPT, ANSWER)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found - stock).abs().max() > 1e-2


def test_the_block_source_uses_the_namespace_of_the_passages(model: BlockModel) -> None:
    store = MemoryStore(1 << 30)
    blocks = BlockSource(model, store, SINK, "tenant")(PROMPT).context.blocks
    assert {one.kv.namespace for one in blocks} == {"tenant"}
