"""The fused rotation for GPUs is compared with PyTorch's before its first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.rope import Pairing, RotaryLayout, fused_rotation, rotate

CPU = torch.device("cpu")
Kernel = Callable[..., None]


def right(out: Tensor, states: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> None:
    pairing: Pairing = "interleaved" if interleaved else "half"
    layout = RotaryLayout(torch.ones(cos.shape[-1] // 2), pairing)
    out.copy_(rotate(states.float(), cos, sin, layout))


def wrong_after_16_rows(out: Tensor, *rest: Tensor, interleaved: bool) -> None:
    right(out, *rest, interleaved=interleaved)
    out[:, 16:] += 0.1


def wrong_pairing(out: Tensor, *rest: Tensor, interleaved: bool) -> None:
    right(out, *rest, interleaved=False)


def wrong_head(out: Tensor, *rest: Tensor, interleaved: bool) -> None:
    right(out, *rest, interleaved=interleaved)
    out[1:] = out[:1]


def nothing(out: Tensor, *_: Tensor, interleaved: bool) -> None:
    out.fill_(torch.nan)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Kernel], None]]:
    """Return a function that replaces the Triton kernel."""
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    fused_rotation.cache_clear()

    def use(kernel: Kernel) -> None:
        module: Any = ModuleType("rotation")
        module.rotate_fused = kernel
        monkeypatch.setitem(sys.modules, "blockattn_rag.kv.rotation", module)

    yield use
    fused_rotation.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize(("size", "rotary"), [(64, 64), (96, 48)])
def test_a_correct_kernel_is_used(
    use: Callable[[Kernel], None], dtype: torch.dtype, pairing: Pairing, size: int, rotary: int
) -> None:
    use(right)
    for states in (dtype, torch.float32):
        fused = fused_rotation(CPU, states, dtype, size, rotary, pairing)
        assert fused is not None
        keys, out = torch.randn(2, 5, size).to(states), torch.empty(2, 5, size, dtype=dtype)
        layout = RotaryLayout(torch.ones(rotary // 2), pairing)
        cos, sin = layout.cos_sin(torch.arange(5), CPU)
        fused(out, keys, cos, sin)
        torch.testing.assert_close(out, rotate(keys.float(), cos, sin, layout).to(dtype))


@pytest.mark.parametrize("kernel", [wrong_after_16_rows, wrong_head, wrong_pairing, nothing])
def test_an_incorrect_kernel_is_not_used(use: Callable[[Kernel], None], kernel: Kernel) -> None:
    use(kernel)
    with pytest.raises(UnsupportedModelError, match="differs from PyTorch's by"):
        fused_rotation(CPU, torch.float32, torch.bfloat16, 64, 64, "interleaved")


def test_a_kernel_that_cannot_be_compiled_is_not_used(
    use: Callable[[Kernel], None], caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError("no C compiler")

    use(failing)
    assert fused_rotation(CPU, torch.float32, torch.float32, 64, 64, "half") is None
    assert "no C compiler" in caplog.text


def test_an_unknown_pairing_raises_value_error() -> None:
    pairing: Any = "thirds"
    with pytest.raises(ValueError, match="Unknown pairing 'thirds': expected one of half"):
        RotaryLayout(torch.ones(8), pairing)
