"""Recording of calls that still run."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest


def recorded(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Record all calls of a function or method. Each has ``args`` and ``kwargs``."""
    calls: list[Any] = []
    original = getattr(owner, name)

    def recording(*args: Any, **options: Any) -> Any:
        calls.append(mock.call(*args, **options))
        return original(*args, **options)

    monkeypatch.setattr(owner, name, recording)
    return calls
