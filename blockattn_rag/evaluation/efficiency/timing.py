"""Timing several ways of doing one thing, side by side."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

OnProgress = Callable[[int, int], None]
"""Called with runs done and all runs."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Several repeats of one measurement."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


class Turns:
    """Measures ways in turns, so that a disturbance hits all of them; each is warmed up once.

    Args:
        repeats: counted runs of each way.
        total: rounds that will be measured in all, for the progress.
        on_progress: told after each run.
    """

    def __init__(self, repeats: int, total: int, on_progress: OnProgress | None = None) -> None:
        check_sizes(repeats=repeats)
        self._repeats = repeats
        self._total = total
        self._on_progress = on_progress
        self._rounds = 0

    def measure(self, ways: Mapping[str, Callable[[], float]]) -> dict[str, Spread]:
        """What each way returned, by its name."""
        found: dict[str, list[float]] = {name: [] for name in ways}
        for repeat in range(self._repeats + 1):
            for step, (name, way) in enumerate(ways.items()):
                found[name].append(way())
                if self._on_progress:
                    runs = len(ways) * (self._repeats + 1)
                    done = self._rounds * runs + repeat * len(ways) + step + 1
                    self._on_progress(done, self._total * runs)
        self._rounds += 1
        return {name: Spread.of(values[1:]) for name, values in found.items()}


def fields(spreads: Mapping[str, Spread], unit: str = "s") -> dict[str, float]:
    """A row's fields: ``<way>_s``, ``<way>_min_s``, ``<way>_max_s``."""
    row: dict[str, float] = {}
    for name, spread in spreads.items():
        row |= {
            f"{name}_{unit}": spread.median,
            f"{name}_min_{unit}": spread.low,
            f"{name}_max_{unit}": spread.high,
        }
    return row


def check_positive(**values: float) -> None:
    """Refuse what is not above 0.

    Raises:
        ValueError: naming the value.
    """
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name} must be above 0, found {value}")


def check_sizes(**sizes: int) -> None:
    """Refuse what is below 1.

    Raises:
        ValueError: naming the size.
    """
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")


def machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What the figures depend on: processor, threads, accelerator, versions.

    ``accelerator`` is the one that ``device`` names; None for the CPU.
    """

    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {
        "processor": processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "accelerator": _accelerator(torch.device(device)),
        "versions": versions,
    }


def _accelerator(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def processor() -> str:
    """The processor's name, from Linux's own list where there is one."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as listing:
            names = [line.partition(":")[2].strip() for line in listing if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()
