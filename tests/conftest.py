"""What all tests share: repeatable examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

# Shared machines are slow at times; a deadline would fail on them by chance.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(params=DEVICES)
def device(request: Any) -> Iterator[torch.device]:
    """Each device that is here, in turn; new tensors of the test lie on it."""
    with torch.device(request.param) as chosen:
        yield chosen
