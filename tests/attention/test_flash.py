"""Flash kernels from PyTorch and other packages: the fastest exact one is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention import flash
from blockattn_rag.attention.flash import PYTORCH, exact_kernels, fastest_flash
from blockattn_rag.attention.kernels import attend_causal, attend_flash, attend_plain
from tests.attention.cuda_stand_ins import (
    FLASH_PACKAGES,
    HALF,
    cuda_kernels_on_cpu,
    flash_attn_2,
    install_flash,
)

CPU, SIZE = torch.device("cpu"), 64
FA2, FA3, FA4 = FLASH_PACKAGES


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A simulated Hopper GPU without flash packages, whose kernels are stand-ins."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (9, 0))
    caches: Any = flash._packages, fastest_flash
    for one in caches:
        one.cache_clear()
    with cuda_kernels_on_cpu():
        yield monkeypatch
    for one in caches:
        one.cache_clear()


class Timed:
    """Packages whose kernels take the given seconds (PyTorch's takes 1). Records their calls."""

    def __init__(self, gpu: pytest.MonkeyPatch, **seconds: float) -> None:
        self.calls: list[str] = []
        self._seconds = {FLASH_PACKAGES[name][0]: taken for name, taken in seconds.items()}
        for name in seconds:
            install_flash(gpu, name, self._counted(*FLASH_PACKAGES[name]))
        gpu.setattr(flash, "elapsed_s", self._elapsed_s)

    def _counted(self, place: str, stand_in: Callable[..., Any]) -> Callable[..., Any]:
        def function(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(place)
            return stand_in(*args, **kwargs)

        return function

    def _elapsed_s(self, work: Callable[[], object], _: torch.device) -> float:
        self.calls.clear()
        work()
        return self._seconds[self.calls[0]] if self.calls else 1.0


def states(dtype: torch.dtype, queries: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = (4, queries), (2, 40), (2, 40)
    query, key, value = (
        torch.randn(1, *shape, SIZE, generator=generator).to(dtype) for shape in shapes
    )
    return query, key, value


@torch.no_grad()
def check_attention(dtype: torch.dtype) -> None:
    """Check that both kernels that the package calls match the reference kernel."""
    query, key, value = states(dtype)
    keys, values = (one.repeat_interleave(2, dim=1) for one in (key, value))
    expected = attend_plain(query, keys, values, 0.25)
    found = attend_flash(query, keys, values, 0.25)
    torch.testing.assert_close(found.lse, expected.lse, atol=1e-3, rtol=0)
    torch.testing.assert_close(found.output, expected.output, atol=0.05, rtol=0)
    seen = torch.ones(5, 40, dtype=torch.bool).tril(35)
    causal = attend_plain(query, keys, values, 0.25, seen).output
    found_causal = attend_causal(query, key, value, 0.25).float()
    torch.testing.assert_close(found_causal, causal, atol=0.05, rtol=0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", FLASH_PACKAGES)
def test_the_fastest_kernel_is_used(gpu: pytest.MonkeyPatch, name: str, dtype: torch.dtype) -> None:
    timed = Timed(gpu, **{**dict.fromkeys(FLASH_PACKAGES, 0.5), name: 0.4})
    assert exact_kernels(CPU, dtype, SIZE).keys() == {PYTORCH, *FLASH_PACKAGES}
    fastest_flash(CPU, dtype, SIZE)
    timed.calls.clear()
    check_attention(dtype)
    assert timed.calls == [FLASH_PACKAGES[name][0]] * 2


@pytest.mark.parametrize("seconds", [0.97, 1.5])
def test_pytorchs_kernel_is_used_unless_a_package_is_clearly_faster(
    gpu: pytest.MonkeyPatch, seconds: float
) -> None:
    timed = Timed(gpu, **{FA2: seconds})
    fastest_flash(CPU, torch.bfloat16, SIZE)
    timed.calls.clear()
    check_attention(torch.bfloat16)
    assert timed.calls == []


def test_a_package_replaces_a_failing_pytorch_kernel(gpu: pytest.MonkeyPatch) -> None:
    timed = Timed(gpu, **{FA2: 2.0})
    missing = RuntimeError("no kernel image is available")
    gpu.setattr(flash, "_by_pytorch", Mock(side_effect=missing))
    check_attention(torch.bfloat16)
    assert timed.calls


def wrong_alignment(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Any:
    """Aligns the first query with the first key, unlike FlashAttention's causal mask."""
    if not options.get("causal"):
        return flash_attn_2(query, key, *rest, **options)
    rows, queries, *shape = query.shape
    longer = torch.cat([query, query.new_zeros(rows, key.shape[1] - queries, *shape)], dim=1)
    output, lse, _ = flash_attn_2(longer, key, *rest, **options)
    return output[:, :queries], lse[..., :queries], None


def wrong_base(*args: Any, **options: Any) -> Any:
    output, lse, _ = flash_attn_2(*args, **options)
    return output, lse * 1.4427, None


def wrong_heads(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Assigns key heads to the wrong query heads."""
    return flash_attn_2(query, key.flip(2), value.flip(2), **options)


def wrong_function(query: Tensor, key: Tensor, value: Tensor) -> Any:
    """Has the signature of an older version."""
    raise AssertionError


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (wrong_alignment, "its output is off by"),
        (wrong_base, "its output is off by"),
        (wrong_heads, "its output is off by"),
        (wrong_function, "it failed: .* got an unexpected keyword argument"),
    ],
)
def test_kernels_with_wrong_results_are_not_used(
    gpu: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kernel: Callable[..., Any],
    message: str,
) -> None:
    install_flash(gpu, FA2, kernel)
    gpu.setattr(flash, "elapsed_s", lambda *_: 1.0)
    assert exact_kernels(CPU, torch.bfloat16, SIZE).keys() == {PYTORCH}
    assert re.search(f"Not using {FA2}.*{message}", caplog.text)
    check_attention(torch.bfloat16)


@pytest.mark.parametrize(
    ("capability", "names"),
    [((8, 0), {FA2}), ((9, 0), {FA2, FA3, FA4}), ((10, 0), {FA2, FA4}), ((7, 5), set())],
)
def test_each_package_is_used_on_the_gpus_that_it_supports(
    gpu: pytest.MonkeyPatch, capability: tuple[int, int], names: set[str]
) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    for name in FLASH_PACKAGES:
        install_flash(gpu, name)
    assert exact_kernels(CPU, torch.bfloat16, SIZE).keys() == {PYTORCH, *names}


def test_a_package_is_used_without_the_other_one_in_its_namespace(gpu: pytest.MonkeyPatch) -> None:
    install_flash(gpu, FA4)  # creates `flash_attn` without FlashAttention 2
    assert exact_kernels(CPU, torch.bfloat16, SIZE).keys() == {PYTORCH, FA4}


def test_out_of_memory_is_raised(gpu: pytest.MonkeyPatch) -> None:
    install_flash(gpu, FA2, Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        attend_causal(*states(torch.bfloat16), 0.25)
