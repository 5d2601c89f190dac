"""The one-standard-error rule."""

from __future__ import annotations

import numpy as np
import pytest

from blockattn_rag.lab.repair.compare import choose

NOISE = np.array([0.1, -0.1, 0.2, -0.2])


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ({"none": 0.0, "sink": 0.0, "trained": 0.0}, "none"),
        ({"none": 1.0, "sink": 0.5, "trained": 0.0}, "trained"),
        ({"none": 1.0, "sink": 0.01, "trained": 0.0}, "sink"),  # within the noise of the best
        ({"none": 0.0, "sink": 0.5, "trained": 1.0}, "none"),
    ],
)
def test_simplest_within_one_error_is_chosen(gains: dict[str, float], expected: str) -> None:
    losses = {name: 2 + gain + (NOISE if gain else 0 * NOISE) for name, gain in gains.items()}
    assert choose(losses) == expected


def test_the_standard_error_is_that_of_the_paired_difference() -> None:
    """What all recipes find hard does not hide a small constant difference."""
    hard = np.array([0.0, 10.0, 20.0, 30.0])
    assert choose({"none": hard + 0.1, "sink": hard}) == "sink"


@pytest.mark.parametrize(("gain", "expected"), [(0.05, "free"), (0.5, "promote")])
def test_a_recipe_that_costs_tokens_has_to_be_clearly_better(gain: float, expected: str) -> None:
    noise = np.tile(NOISE, 2)  # standard error 0.06
    losses = {"free": np.full(8, 2.0), "promote": 2 - gain + noise}
    assert choose(losses, ["promote"]) == expected


@pytest.mark.parametrize(
    ("gain", "questions", "expected"), [(0.1, 8, "in use"), (0.5, 8, "sink"), (0.5, 4, "in use")]
)
def test_keeps_recipe_in_use_if_as_good(gain: float, questions: int, expected: str) -> None:
    noise = np.tile(NOISE, questions // 4)
    losses = {"sink": 2 - gain + noise, "in use": np.full(questions, 2.0)}
    assert choose(losses) == "sink"
    assert choose(losses, in_use="in use") == expected


def test_no_free_recipe_is_passed_over_for_a_costly_one_that_is_as_good() -> None:
    losses = {"none": 3 + NOISE, "sink": 2 + NOISE, "promote": 2 - NOISE}
    assert choose(losses, ["promote"]) == "sink"
