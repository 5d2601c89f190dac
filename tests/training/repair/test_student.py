"""Block mode with a part that is trained: where it acts, and where gradients go."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from blockattn_rag.attention.context_merge import FixedMerge, LearnedMerge
from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.engine.fetcher import HowEncoded
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.model import BlockModel
from blockattn_rag.model.correction import NUM_PLACES, Correction, LayerCorrection
from blockattn_rag.model.correction_file import save_correction
from blockattn_rag.model.reader import Reader
from blockattn_rag.store import MemoryStore
from blockattn_rag.store.namespaces import OPEN
from blockattn_rag.training.repair.student import BlockSource, ReadyPrompt, Student
from tests.training.repair.runs import PROMPT, block_model

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
    return BlockSource(model, store)(PROMPT, HowEncoded(SINK))


def reader_student(model: BlockModel, **settings: Any) -> Student:
    return Student(model, reader=Reader.new(model.hf_model, rank=4, alpha=8), **settings)


def merge_student(model: BlockModel) -> Student:
    return Student(model, merge=LearnedMerge.identity(2, 4, 2, 8))


def correction_student(model: BlockModel) -> Student:
    layer = LayerCorrection(torch.zeros(2, 16, 16), torch.zeros(2, NUM_PLACES, 16))
    return Student(model, correction=Correction((layer, layer), SINK, model.fingerprint))


STUDENTS = pytest.mark.parametrize("make", [reader_student, merge_student, correction_student])


@STUDENTS
def test_an_untrained_student_predicts_what_block_mode_does(
    model: BlockModel, ready: ReadyPrompt, make: Any
) -> None:
    found = make(model)(ready, ANSWER)
    expected = BlockAttentionEngine(model, sink=SINK).answer_logits(PROMPT, ANSWER)
    error = (found - expected).abs().max() / expected.abs().max()
    assert error.item() < 1e-4  # the contract's bound for float32


@STUDENTS
def test_gradients_reach_all_that_is_trained_and_nothing_else(
    model: BlockModel, store: MemoryStore, ready: ReadyPrompt, make: Any
) -> None:
    before = {key: store.get(key) for key in store.keys()}  # noqa: SIM118 - a store is no dict
    copies = {key: [t.clone() for t in (*kv.keys, *kv.values)] for key, kv in before.items() if kv}
    assert len(copies) == 4  # the system message and three passages
    student = make(model)
    with torch.no_grad():  # LoRA's second matrices begin with 0 and would hide the first
        for parameter in student.parameters():
            parameter.add_(0.01)
    student(ready, ANSWER).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in student.parameters())
    assert all(p.grad is None for p in model.hf_model.parameters())
    torch.optim.SGD(student.parameters(), lr=1.0).step()
    again = BlockSource(model, MemoryStore(1 << 30))(PROMPT, HowEncoded(SINK))
    fresh = {block.kv.key: block.kv for block in again.context.blocks}
    for key, tensors in copies.items():
        kv = store.get(key)
        assert kv is not None
        for tensor, kept, new in zip(
            tensors, (*kv.keys, *kv.values), (*fresh[key].keys, *fresh[key].values), strict=True
        ):
            assert torch.equal(tensor, kept)
            assert torch.equal(tensor, new)


@STUDENTS
def test_gradients_are_those_of_finite_differences(
    model: BlockModel, ready: ReadyPrompt, make: Any
) -> None:
    student = make(model)
    generator = torch.Generator().manual_seed(0)
    step = [torch.randn(p.shape, generator=generator) for p in student.parameters()]
    with torch.no_grad():
        for parameter, part in zip(student.parameters(), step, strict=True):
            parameter.add_(0.1 * part)

    def loss() -> torch.Tensor:
        logits: torch.Tensor = student(ready, ANSWER)
        return logits.log_softmax(-1)[:, 7].mean()

    loss().backward()  # type: ignore[no-untyped-call]
    slope = sum((p.grad * d).sum() for p, d in zip(student.parameters(), step, strict=True))
    size, values = 1e-3, []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter, part in zip(student.parameters(), step, strict=True):
                parameter.add_(sign * size * part)
            values.append(loss().double())
            for parameter, part in zip(student.parameters(), step, strict=True):
                parameter.sub_(sign * size * part)
    measured = (values[0] - values[1]).item() / (2 * size)
    # float32: rounding of about 1e-6 over a step of 1e-3, and a curvature of the same order
    assert float(slope) == pytest.approx(measured, rel=0.02, abs=5e-3)


def test_a_reader_is_trained_on_top_of_a_fixed_merge(model: BlockModel, ready: ReadyPrompt) -> None:
    merged = reader_student(model, merge=FixedMerge("scale", 0.8))
    engine = BlockAttentionEngine(model, sink=SINK)
    expected = engine.answer_logits(PROMPT, ANSWER, merge="scale:0.8")
    torch.testing.assert_close(merged(ready, ANSWER).detach(), expected, rtol=0, atol=1e-3)
    plain = reader_student(model)(ready, ANSWER)
    assert (plain - expected).abs().max() > 1e-2


def test_the_model_is_no_part_of_the_student(model: BlockModel) -> None:
    student = reader_student(model)
    assert student.reader is not None
    own = {id(parameter) for parameter in student.reader.parameters()}
    assert {id(parameter) for parameter in student.parameters()} == own
    assert sum(tensor.numel() for tensor in student.state_dict().values()) == sum(
        parameter.numel() for parameter in student.reader.parameters()
    )
    assert all(name.startswith("trained.") for name in student.state_dict())


def test_the_distance_of_a_merge_is_the_mean_square_of_its_parameters(model: BlockModel) -> None:
    student = merge_student(model)
    assert student.distance_from_identity().item() == 0
    with torch.no_grad():
        student.trained[1].fill_(2.0)
    # 2 layers of 4 biases, of 2 x (4 + 4 + 2 x 8) parameters
    assert student.distance_from_identity().item() == pytest.approx(4 * 8 / 48)


def test_a_student_has_something_to_train(model: BlockModel) -> None:
    with pytest.raises(ValueError, match="a correction to train, found none"):
        Student(model, merge=FixedMerge("scale", 0.9))


def test_a_correction_that_is_trained_acts_as_when_passages_are_encoded(
    model: BlockModel, ready: ReadyPrompt, tmp_path: Path
) -> None:
    student = correction_student(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    found = student(ready, ANSWER).detach()
    assert student.correction is not None
    save_correction(student.correction, tmp_path / "kv.safetensors")
    engine = BlockAttentionEngine(model, sink=SINK)
    stock = engine.answer_logits(PROMPT, ANSWER)
    expected = engine.answer_logits(PROMPT, ANSWER, correction=tmp_path / "kv.safetensors")
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (found - stock).abs().max() > 1e-2


def test_a_correction_is_trained_on_blocks_in_int8_as_on_others(model: BlockModel) -> None:
    student = correction_student(model)
    plain, rounded = (
        student(
            BlockSource(model, MemoryStore(1 << 30), OPEN, kind)(PROMPT, HowEncoded(SINK)), ANSWER
        )
        for kind in get_args(KVDtype)
    )
    assert 0 < (rounded - plain).norm() < 0.05 * plain.norm()
