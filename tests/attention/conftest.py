"""What the tests of attention share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """As in every answer."""
    with torch.no_grad():
        yield
