"""Fixtures of the attention tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.attention.cuda_stand_ins import cuda_kernels_on_cpu


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """Disable gradients, as inference does."""
    with torch.no_grad():
        yield


@pytest.fixture
def cuda_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the CUDA kernels, or their stand-ins if there is no GPU."""
    if device.type == "cuda":
        yield
        return
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (8, 0))
    with cuda_kernels_on_cpu():
        yield
