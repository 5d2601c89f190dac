from __future__ import annotations

import pytest

from blockattn_rag.lab.efficiency.timing import Turns, check_sizes, machine


def test_the_warm_up_is_not_counted_and_ways_take_turns() -> None:
    calls: list[str] = []
    times = {"a": iter([100.0, 8.0, 10.0, 3.0]), "b": iter([100.0, 1.0, 5.0, 2.0])}

    def way(name: str) -> float:
        calls.append(name)
        return next(times[name])

    steps: list[tuple[int, int]] = []
    turns = Turns(3, 1, lambda done, total: steps.append((done, total)))
    found = turns.measure({"a": lambda: way("a"), "b": lambda: way("b")})
    assert found == {
        "a_s": 8.0, "a_min_s": 3.0, "a_max_s": 10.0, "b_s": 2.0, "b_min_s": 1.0, "b_max_s": 5.0,
    }  # fmt: skip
    assert calls == ["a", "b"] * 4
    assert steps == [(i, 8) for i in range(1, 9)]


def test_progress_goes_on_over_rounds() -> None:
    steps: list[tuple[int, int]] = []
    turns = Turns(1, 2, lambda done, total: steps.append((done, total)))
    for _ in range(2):
        turns.measure({"a": lambda: 1.0})
    assert steps == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_fields_are_named_by_way_and_unit() -> None:
    assert Turns(1, 1).measure({"full": lambda: 2.0}, "mb") == {
        "full_mb": 2.0,
        "full_min_mb": 2.0,
        "full_max_mb": 2.0,
    }


def test_sizes_below_one_are_refused_by_name() -> None:
    check_sizes(repeats=1)
    with pytest.raises(ValueError, match="repeats must be at least 1, found 0"):
        Turns(0, 1)


def test_the_machine_is_described() -> None:
    found = machine()
    assert {"torch", "transformers"} <= set(found["versions"])
    assert found["processor"]
    assert found["threads"] >= 1
