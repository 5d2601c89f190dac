"""Timing of several functions, side by side."""

from __future__ import annotations

import contextlib
import platform
import statistics
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch

OnProgress = Callable[[int, int], None]
"""Function of the number of finished runs and the number of all runs."""


class Turns:
    """Times functions in turns, so that disturbances affect all of them. Warms each up once.

    Args:
        repeats: Counted runs of each function.
        total: Number of calls of ``measure``, each with the same number of functions.
        on_progress: Called after each run.
    """

    def __init__(self, repeats: int, total: int, on_progress: OnProgress | None = None) -> None:
        check_sizes(repeats=repeats)
        self._repeats = repeats
        self._total = total
        self._on_progress = on_progress
        self._done = 0

    def measure(self, ways: Mapping[str, Callable[[], float]], unit: str = "s") -> dict[str, Any]:
        """Run each function and summarize its results, without the warm-up.

        Returns:
            Fields of a row: the median ``<name>_<unit>``, ``<name>_min_<unit>`` and
            ``<name>_max_<unit>`` for each function.
        """
        found: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(self._repeats + 1):
            for name, way in ways.items():
                found[name].append(way())
                self._done += 1
                if self._on_progress:
                    self._on_progress(self._done, self._total * len(ways) * (self._repeats + 1))
        row = {}
        for name, (_, *counted) in found.items():
            for end, of in (("", statistics.median), ("_min", min), ("_max", max)):
                row[f"{name}{end}_{unit}"] = of(counted)
        return row


def check_sizes(**sizes: int) -> None:
    """Raise ``ValueError`` for a size below 1."""
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, found {value}")


def machine(device: str | torch.device = "cpu") -> dict[str, Any]:
    """Describe the machine that results depend on: processor, threads, accelerator, versions.

    ``accelerator`` is the name of ``device``, or None for the CPU.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "processor": processor(),
        "system": platform.system(),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "accelerator": None if device.type == "cpu" else name,
        "versions": {package: metadata.version(package) for package in ("torch", "transformers")},
    }


def processor() -> str:
    """Name of the processor, from ``/proc/cpuinfo`` if it exists."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as listing:
        for line in listing:
            if "model name" in line:
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
