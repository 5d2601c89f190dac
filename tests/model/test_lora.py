"""One layer's LoRA: in the layer's dtype, by the matrices as they are, told apart by content."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model.lora import Lora, lora_digest, new_lora

INPUT = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(3))


def a_lora(seed: int = 0, *, trained: bool = False, **options: Any) -> Lora:
    generator = torch.Generator().manual_seed(seed)
    down, up = (
        nn.Parameter(torch.randn(*shape, generator=generator), requires_grad=trained)
        for shape in ((3, 6), (4, 3))
    )
    return Lora(down, up, **{"alpha": 6, **options})


@pytest.mark.parametrize(("use_rslora", "scaling"), [(False, 2.0), (True, 6 / 3**0.5)])
def test_the_output_gains_the_scaled_product(use_rslora: bool, scaling: float) -> None:
    lora, output = a_lora(use_rslora=use_rslora), torch.ones(2, 5, 4)
    expected = 1 + scaling * (INPUT @ lora.down.T @ lora.up.T)
    assert torch.allclose(lora(INPUT, output), expected, atol=1e-5)
    assert torch.equal(output, torch.ones(2, 5, 4))  # the layer's own output is not written


@pytest.mark.parametrize("trained", [False, True])
def test_a_layer_of_16_bits_is_followed_and_so_are_changed_matrices(trained: bool) -> None:
    lora, output = a_lora(trained=trained), torch.zeros(2, 5, 4, dtype=torch.bfloat16)

    def error() -> float:
        found = lora(INPUT.bfloat16(), output)
        assert found.dtype == torch.bfloat16
        expected = 2 * (INPUT @ lora.down.T @ lora.up.T)
        return relative_error(found.detach().float(), expected.detach())

    assert error() < 0.02  # a few roundings to 8 bits
    with torch.no_grad():
        lora.up.mul_(-3)
    assert error() < 0.02


def test_matrices_are_converted_once_unless_they_are_trained() -> None:
    frozen, trained = a_lora(), a_lora(trained=True)
    with torch.inference_mode():  # what is kept must serve outside of it too
        first = frozen._matrices(torch.float16, torch.device("cpu"))[0]
    assert frozen._matrices(torch.float16, torch.device("cpu"))[0] is first
    assert not first.is_inference()
    converted = [trained._matrices(torch.float16, torch.device("cpu"))[0] for _ in range(2)]
    assert converted[0] is not converted[1]
    output: Any = trained(INPUT.half(), torch.zeros(2, 5, 4, dtype=torch.float16))
    output.float().sum().backward()
    assert trained.down.grad is not None
    assert trained.down.grad.abs().sum() > 0


def test_gradients_pass_through_a_frozen_adapter_of_another_dtype() -> None:
    lora, input = a_lora(), INPUT.half().requires_grad_()
    with torch.inference_mode():
        lora(INPUT.half(), torch.zeros(2, 5, 4, dtype=torch.float16))
    output: Any = lora(input, torch.zeros(2, 5, 4, dtype=torch.float16))
    output.float().sum().backward()
    assert input.grad is not None
    assert input.grad.abs().sum() > 0


def test_a_new_adapter_is_drawn_as_peft_draws_it_and_adds_nothing() -> None:
    layer = nn.Linear(64, 48).to(torch.bfloat16)
    lora = new_lora(layer, 200, 32, torch.Generator().manual_seed(0))
    assert lora.down.dtype == lora.up.dtype == torch.float32
    # Kaiming with a = sqrt(5): uniform between -1/sqrt(64) and 1/sqrt(64).
    assert 0.124 < float(lora.down.detach().abs().max()) <= 0.125
    assert abs(float(lora.down.detach().std()) - 0.125 / 3**0.5) < 0.001
    assert not lora.up.any()
    assert lora.down.requires_grad
    assert lora.up.requires_grad


def test_whatever_decides_the_output_decides_the_digest() -> None:
    base = lora_digest({"a": a_lora(), "b": a_lora(1)})
    assert lora_digest({"b": a_lora(1), "a": a_lora()}) == base
    swapped, renamed = {"a": a_lora(1), "b": a_lora()}, {"a": a_lora(), "c": a_lora(1)}
    scaled, fewer = {"a": a_lora(), "b": a_lora(1, alpha=7)}, {"a": a_lora()}
    turned = {"a": a_lora(), "b": a_lora(1, use_rslora=True)}
    changed = {"a": a_lora(), "b": a_lora(1)}
    with torch.no_grad():
        changed["b"].up[0, 0] += 1e-3
    all_of_them = (swapped, renamed, scaled, fewer, turned, changed)
    assert len({base, *map(lora_digest, all_of_them)}) == 7
