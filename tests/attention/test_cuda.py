"""What runs on CUDA, as far as it can be tested without: choices, and what kernels are handed."""

from __future__ import annotations

import sys
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from blockattn_rag.attention import cuda
from blockattn_rag.attention.kernels import Kernel, Partial
from tests.attention.test_kernels import KV_HEADS, SIZE, budget, exact, random

pytestmark = pytest.mark.usefixtures("device")


def flash_stand_in(
    query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float, return_softmax_lse: bool
) -> Partial:
    """As flash-attn's documentation has it: tokens before heads, log-sum-exp ``[B, K, Q]``."""
    assert return_softmax_lse
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    found = exact(query, key, value, softmax_scale, None)
    return Partial(found.output.transpose(1, 2).to(query.dtype), found.lse.float())


def test_flash_attn_is_handed_tokens_before_heads_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "flash_attn", lambda: flash_stand_in)
    query, key, value = (
        random(1, KV_HEADS, n, SIZE, seed=n, dtype=torch.bfloat16) for n in (3, 40, 41)
    )
    value = value[:, :, :40]
    expected = exact(query, key, value, 0.25, None)
    kernel = cuda.kernel_on_cuda(query, None)
    assert kernel is cuda.attend_flash_attn
    found = kernel(query, key, value, 0.25, None)
    assert found.output.dtype == found.lse.dtype == torch.float32
    assert (found.output - expected.output).abs().max() <= budget(torch.bfloat16, 40)
    assert (found.lse - expected.lse).abs().max() <= budget(torch.float32, 40)


def test_without_flash_attn_there_is_no_kernel_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda.flash_attn.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert cuda.flash_attn() is None
    monkeypatch.setitem(sys.modules, "flash_attn", Mock(flash_attn_with_kvcache=flash_stand_in))
    assert cuda.flash_attn() is None  # looked for once
    cuda.flash_attn.cache_clear()
    assert cuda.flash_attn() is flash_stand_in
    cuda.flash_attn.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "size", "masked", "kernel"),
    [
        (torch.bfloat16, 64, False, cuda.attend_flash_attn),
        (torch.float16, 256, False, cuda.attend_flash_attn),
        (torch.bfloat16, 512, False, cuda.attend_flash),
        (torch.bfloat16, 64, True, cuda.attend_memory_efficient),
        (torch.float32, 64, False, cuda.attend_memory_efficient),
    ],
)
def test_the_kernel_on_cuda_goes_by_type_head_size_and_mask(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, size: int, masked: bool, kernel: Kernel
) -> None:
    query, mask = torch.empty(1, 2, 3, size, dtype=dtype), torch.empty(1) if masked else None
    monkeypatch.setattr(cuda, "flash_attn", lambda: flash_stand_in)
    assert cuda.kernel_on_cuda(query, mask) is kernel
    monkeypatch.setattr(cuda, "flash_attn", lambda: None)
    without = cuda.attend_flash if kernel is cuda.attend_flash_attn else kernel
    assert cuda.kernel_on_cuda(query, mask) is without
