"""Packed weights give the same results, and are not used where they would be wrong."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar
from unittest.mock import Mock

import psutil
import pytest
import torch
from torch import Tensor, nn

from blockattn_rag.model import packing
from blockattn_rag.model.packing import pack_linears
from tests.models import tiny_model

M = TypeVar("M", bound=nn.Module)

needs_packing = pytest.mark.skipif(not packing._is_available(), reason="packing is not available")


def a_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(57, 83, bias=bias)


def packed(module: M) -> M:
    assert pack_linears(module) > 0
    return module


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [4, 5, 50, 64, 255])
def test_a_packed_layer_is_exact_within_rounding(rows: int, bias: bool) -> None:
    plain = a_layer(bias)
    layer = packed(copy.deepcopy(plain))
    input = torch.randn(1, rows, 57)
    with torch.inference_mode():
        found, expected = layer(input), plain(input)
    # A sum of 57 products, in any order, has at most 57 roundings of the sum of absolute products.
    budget = 58 * 2.0**-24 * (input.abs() @ plain.weight.abs().T + 1)
    assert found.shape == expected.shape
    assert ((found - expected).abs() <= 2 * budget).all()


@needs_packing
def test_packed_weights_are_used_for_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, product = packed(a_layer()), Mock(wraps=packing._packed_linear)
    monkeypatch.setattr(packing, "_packed_linear", product)
    with torch.inference_mode():
        for count in (1, 3, 4, 50, 255, 256):
            layer(torch.randn(count, 57))
            layer(torch.randn(1, count, 57))
    layer(torch.randn(50, 57))  # not packed, because gradients are enabled
    with torch.inference_mode():
        layer.bfloat16()(torch.randn(50, 57).bfloat16())  # not packed, because there is no gain
    rows = [call.args[0].shape[-2] for call in product.call_args_list]
    assert rows == [4, 4, 50, 50, 255, 255]


@needs_packing
def test_a_copy_of_a_packed_layer_has_its_own_weights() -> None:
    layer, input = packed(a_layer()), torch.randn(8, 57)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    with torch.inference_mode():
        assert torch.equal(other(input), layer.bias.expand(8, -1))
        assert not torch.equal(layer(input), other(input))


@needs_packing
def test_a_packed_model_is_saved_moved_and_trained_as_before() -> None:
    model, plain = packed(tiny_model()), tiny_model()
    assert model.state_dict().keys() == plain.state_dict().keys()
    ids = torch.arange(6)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    plain(input_ids=ids, labels=ids).loss.backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)  # type: ignore[arg-type]
    with torch.inference_mode():
        halves = model.bfloat16()(input_ids=ids).logits
        assert torch.equal(halves, plain.bfloat16()(input_ids=ids).logits)


def test_a_model_that_would_fill_the_memory_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = a_layer()
    need = 4 * layer.weight.nbytes
    monkeypatch.setattr(packing, "free_memory", lambda: need - 1)
    assert pack_linears(layer) == 0
    assert "forward" not in vars(layer)


def test_other_layers_and_dtypes_are_not_packed() -> None:
    class Other(nn.Linear):
        pass

    class Quantized(torch.Tensor):
        """Reports float32 as its dtype, as quantized weights do."""

    replaced, quantized = a_layer(), a_layer()
    quantized.weight = nn.Parameter(torch.Tensor._make_subclass(Quantized, quantized.weight.data))
    assert quantized.weight.dtype == torch.float32
    replaced.forward = lambda input: input  # type: ignore[method-assign]
    for module in (Other(57, 83), a_layer().bfloat16(), replaced, quantized, nn.Conv1d(3, 3, 1)):
        assert pack_linears(module) == 0


def test_containers_limit_free_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    assert packing.free_memory(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("max\n", "utf-8")
    (tmp_path / "memory.current").write_text("300\n", "utf-8")
    assert packing.free_memory(tmp_path) == 1000
    (tmp_path / "memory.max").write_text("700\n", "utf-8")
    assert packing.free_memory(tmp_path) == 400
    (tmp_path / "memory.max").write_text("200\n", "utf-8")
    assert packing.free_memory(tmp_path) == 0


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(2)


def by_optimizer(layer: nn.Linear) -> None:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    layer(torch.randn(8, 57)).square().mean().backward()
    optimizer.step()  # bypasses change detection


def in_a_new_engine(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)  # bypasses change detection
    packed(layer)


@needs_packing
@pytest.mark.parametrize("change", [in_place, by_optimizer, in_a_new_engine])
def test_changed_weights_are_packed_again(change: Callable[[nn.Linear], None]) -> None:
    layer, input = packed(a_layer()), torch.randn(8, 57)
    for _ in range(2):
        with torch.inference_mode():
            found = layer(input)
            expected = nn.functional.linear(input, layer.weight, layer.bias)
        assert torch.allclose(found, expected, atol=1e-5)
        change(layer)


@needs_packing
def test_an_unreferenced_packed_layer_is_freed_immediately() -> None:
    layer = packed(a_layer())
    with torch.inference_mode():
        layer(torch.randn(8, 57))
    weight = weakref.ref(layer.weight)
    gc.disable()
    try:
        del layer
        assert weight() is None
    finally:
        gc.enable()


@needs_packing
def test_under_autocast_all_rows_have_its_dtype() -> None:
    layer = packed(a_layer())
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert {layer(torch.randn(rows, 57)).dtype for rows in (2, 8)} == {torch.bfloat16}


@pytest.mark.parametrize("fault", [AttributeError, RuntimeError, TypeError, None])
def test_packing_that_fails_or_is_wrong_is_not_used(
    fault: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(weight: Tensor) -> Tensor:
        if fault is not None:
            raise fault("no such thing")
        return weight

    monkeypatch.setattr(packing, "_pack", pack)
    monkeypatch.setattr(packing, "_packed_linear", lambda *_: torch.zeros(1, 8, 40))
    monkeypatch.setattr(packing, "_is_available", packing._is_available.__wrapped__)
    assert pack_linears(a_layer()) == 0
