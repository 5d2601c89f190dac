"""Plans: how much work fits into the time limit of a repair."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from blockattn_rag.errors import DataError
from blockattn_rag.lab.repair.plan import LIMITS, RepairPlan, Speeds

SMOLLM2 = Speeds(answer=2.5, encode=1.6, fetch=0.4, step=1.0)
"""Seconds per operation for SmolLM2 on two cores."""


def plan(
    seconds: float, questions: int = 240, speeds: Speeds = SMOLLM2, **limits: Any
) -> RepairPlan:
    bounds = replace(LIMITS, **limits)
    return RepairPlan.for_time(seconds, speeds, questions, recipes=5, batch=4, limits=bounds)


def seconds_of(found: RepairPlan, speeds: Speeds) -> float:
    """Return the estimated duration of a plan."""
    return (
        found.held_out * speeds.held_out(5)
        + found.closed_form * speeds.closed_form
        + found.samples * speeds.sample(LIMITS.epochs)
        + (found.training_s - LIMITS.epochs * found.samples * speeds.step)
    )


@pytest.mark.parametrize("seconds", [300, 900, 3600])
@pytest.mark.parametrize("factor", [0.1, 1, 3])
def test_a_plan_fits_into_its_time_and_uses_it(seconds: float, factor: float) -> None:
    speeds = Speeds(*(factor * getattr(SMOLLM2, name) for name in SMOLLM2.__slots__))
    found = plan(seconds, speeds=speeds)
    assert seconds_of(found, speeds) <= seconds
    if found.samples < min(LIMITS.samples, LIMITS.draws * (240 - found.held_out)):
        assert seconds_of(found, speeds) > 0.9 * seconds or found.samples == 0


def test_more_time_allows_more_of_everything_up_to_the_limits() -> None:
    short, long, endless = plan(600), plan(900), plan(1e6)
    assert short.samples < long.samples < endless.samples == LIMITS.samples
    # At most a quarter of the 240 questions is held out.
    assert short.held_out <= long.held_out <= endless.held_out == 60
    assert endless.closed_form == LIMITS.closed_form
    assert endless.steps == LIMITS.epochs * LIMITS.samples / 4


def test_the_number_of_held_out_questions_is_even() -> None:
    for questions in range(5, 60):
        found = plan(900, questions)
        assert found.held_out % 2 == 0
        assert questions - 1 <= found.held_out <= questions


def test_too_few_questions_for_an_adapter_are_all_held_out() -> None:
    found = plan(1e6, questions=40)
    assert (found.held_out, found.closed_form, found.samples, found.steps) == (40, 0, 0, 0)
    assert plan(1e6, questions=64).samples > 0


def test_questions_are_drawn_a_limited_number_of_times() -> None:
    found = plan(1e6, questions=20, fewest_to_choose=2)
    assert found.held_out == 4
    assert found.samples == LIMITS.draws * 16


def test_training_is_skipped_if_it_would_be_too_short() -> None:
    held_s = LIMITS.fewest_held_out * SMOLLM2.held_out(5)
    found = plan(held_s + 30, questions=8, fewest_to_choose=2)
    assert (found.samples, found.steps, found.training_s) == (0, 0, 0)
    assert found.closed_form == 9  # in 30 s, at 3.2 s each


def test_too_few_questions_and_too_little_time_are_refused() -> None:
    with pytest.raises(DataError, match="Found 4 distinct questions, expected at least 5"):
        plan(900, questions=4)
    times = r": 0.0 minutes are left, but 0.\d are .* takes 2.5 s.* at least 2 minutes"
    with pytest.raises(DataError, match=times):
        plan(1)
    with pytest.raises(DataError, match=r": 0.0 minutes are left, but \d"):
        plan(-24)  # The repair is overdue. Negative times are not reported.


def test_speeds_of_longer_prompts_are_estimated() -> None:
    found = Speeds(answer=3.0, encode=2.0, fetch=1.0, step=4.0).longer(2.0)
    assert found == Speeds(answer=5.0, encode=4.0, fetch=2.0, step=8.0)
