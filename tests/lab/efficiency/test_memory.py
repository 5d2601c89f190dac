"""Peak memory of a request."""

from __future__ import annotations

import pytest
import torch

from blockattn_rag.lab.efficiency.memory import peak_bytes

KIB = 1024


def test_the_peak_is_what_is_allocated_at_once() -> None:
    def work() -> None:
        first = torch.zeros(256 * KIB, dtype=torch.uint8)
        second = torch.zeros(512 * KIB, dtype=torch.uint8)
        del first, second
        torch.zeros(600 * KIB, dtype=torch.uint8)

    peak = peak_bytes(work, torch.device("cpu"))
    assert 768 * KIB <= peak < 780 * KIB


def test_the_measurement_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    peak_bytes(lambda: torch.zeros(KIB), torch.device("cpu"))
    assert capfd.readouterr().err == ""
