from __future__ import annotations

import pytest

from blockattn_rag.cli.output import duration, size


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (None, "-"),
        (0.0042, "4.2 ms"),
        (0.35, "350 ms"),
        (12.345, "12.35 s"),
        (400, "6.7 min"),
        (20_000, "5.6 h"),
        (353_944.74, "4.1 days"),
    ],
)
def test_durations_are_told_in_units_that_people_use(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown


def test_sizes_are_told_in_powers_of_1024() -> None:
    assert [size(n) for n in (12, 2048, 3 << 20, 5 << 30)] == [
        "12 B", "2.0 KiB", "3.0 MiB", "5.00 GiB",
    ]  # fmt: skip
