"""A reader adapter: LoRA of vLLM, active while the final block and the answer are computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.lora.request import LoRARequest

from blockattn_rag.model.reader import Reader
from tests_vllm.engines import Engine
from tests_vllm.reference import Reference


@pytest.fixture(scope="module")
def folder(reference: Reference) -> Path:
    """A reader that changes answers."""
    reader = Reader.new(reference.model.hf_model, rank=8, alpha=16)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for lora in reader.layers.values():
            lora.up.copy_(torch.randn(lora.up.shape, generator=generator) * 0.3)
    reader.save(reference.folder / "reader", {"fingerprint": reference.profile.fingerprint})
    return reference.folder / "reader"


@pytest.fixture(scope="module")
def engine(reference: Reference) -> Iterator[Engine]:
    options = reference.options(readers=["reader"])
    engine = Engine(options, enable_lora=True, max_lora_rank=8, max_num_batched_tokens=64)
    yield engine
    engine.close()


def test_a_reader_reads_the_base_models_blocks(
    reference: Reference, engine: Engine, folder: Path
) -> None:
    lora = LoRARequest("reader", 1, str(folder))
    for number in (1, 2):
        case = reference.stored(reference.case(number))
        expected = reference.answer(case, reader=folder)
        assert expected != reference.answer(case)
        assert engine.block(case, lora=lora).tokens == expected
        assert engine.block(case).tokens == reference.answer(case)


def test_another_adapter_is_refused(reference: Reference, engine: Engine, folder: Path) -> None:
    case = reference.stored(reference.case(3))
    assert engine.block(case, lora=LoRARequest("other", 2, str(folder))).reason == "error"
    assert engine.block(case).tokens == reference.answer(case)
