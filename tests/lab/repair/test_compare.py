"""Choice of the recipe: one-standard-error rule, and the cheapest recipe within the tolerance."""

from __future__ import annotations

import numpy as np
import pytest

from blockattn_rag.lab.repair.compare import cheapest, choose

NOISE = np.array([0.1, -0.1, 0.2, -0.2])


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"none": 0.0, "sink": 0.0, "trained": 0.0}, "none"),
        ({"none": 1.0, "sink": 0.5, "trained": 0.0}, "trained"),
        ({"none": 1.0, "sink": 0.01, "trained": 0.0}, "sink"),  # within one standard error
        ({"none": 0.0, "sink": 0.5, "trained": 1.0}, "none"),
    ],
)
def test_the_simplest_recipe_within_one_standard_error_is_chosen(
    gains: dict[str, float], expected: str
) -> None:
    losses = {name: 2 + gain + (NOISE if gain else 0 * NOISE) for name, gain in gains.items()}
    assert choose(losses) == expected


def test_the_standard_error_is_that_of_the_paired_difference() -> None:
    """A high variance between questions does not hide a small constant difference."""
    hard = np.array([0.0, 10.0, 20.0, 30.0])
    assert choose({"none": hard + 0.1, "sink": hard}) == "sink"


@pytest.mark.parametrize(
    ("tolerance", "expected"), [(0.9, "free"), (0.95, "5 %"), (0.96, "10 %"), (1.0, "20 %")]
)
def test_the_cheapest_recipe_within_the_tolerance_is_chosen(
    tolerance: float, expected: str
) -> None:
    shares = {"free": 0.9, "5 %": 0.95, "10 %": 0.97, "20 %": 0.98}
    assert cheapest(shares, tolerance) == expected


def test_if_no_recipe_is_within_the_tolerance_the_best_is_chosen() -> None:
    assert cheapest({"free": 0.5, "5 %": 0.8, "10 %": 0.7}, 0.95) == "5 %"


@pytest.mark.parametrize(
    ("gain", "questions", "expected"), [(0.1, 8, "in use"), (0.5, 8, "sink"), (0.5, 4, "in use")]
)
def test_keeps_recipe_in_use_if_as_good(gain: float, questions: int, expected: str) -> None:
    noise = np.tile(NOISE, questions // 4)
    losses = {"sink": 2 - gain + noise, "in use": np.full(questions, 2.0)}
    assert choose(losses) == "sink"
    assert choose(losses, in_use="in use", fewest=8) == expected
