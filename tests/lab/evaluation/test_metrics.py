from __future__ import annotations

import pytest

from blockattn_rag.lab.evaluation.metrics import (
    bootstrap_mean,
    bootstrap_ratio,
    contains_answer,
    exact_match,
    f1_score,
    normalize_answer,
)


def test_normalizing_drops_case_punctuation_spaces_and_articles_but_not_the_whole_answer() -> None:
    assert normalize_answer("  The  Tower, of\tA. Hill! ") == "tower of hill"
    assert normalize_answer("A") == "a"
    assert contains_answer("nothing of the kind: b", ["A"]) == 0.0


def test_accuracy_checks_whether_any_answer_occurs_in_the_output() -> None:
    assert contains_answer("It is 214 metres, I think.", ["300", "214 Metres"]) == 1.0
    assert contains_answer("It is 215 metres.", ["300", "214 metres"]) == 0.0
    # As in the papers, strings match inside words.
    assert contains_answer("in 1970", ["7"]) == 1.0


def test_exact_match_allows_no_other_text() -> None:
    assert exact_match("The Morvale.", ["Morvale"]) == 1.0
    assert exact_match("In Morvale", ["Morvale"]) == 0.0


def test_f1_uses_the_answer_with_the_best_word_overlap() -> None:
    assert f1_score("214 metres", ["metres 214"]) == 1.0
    assert f1_score("about 214 metres", ["214 metres", "x"]) == pytest.approx(0.8)
    assert f1_score("x", ["y"]) == 0.0
    assert f1_score("", ["y"]) == 0.0


def test_the_bootstrap_is_deterministic_and_covers_the_mean() -> None:
    values = [1.0] * 60 + [0.0] * 40
    interval = bootstrap_mean(values)
    assert interval == bootstrap_mean(values)
    assert interval.mean == 0.6
    # The normal approximation gives 0.504 and 0.696.
    assert interval.low == pytest.approx(0.504, abs=0.02)
    assert interval.high == pytest.approx(0.696, abs=0.02)


def test_equal_values_have_no_spread_and_no_values_are_refused() -> None:
    assert bootstrap_mean([1.0, 1.0]) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_mean([])


def test_resamples_with_a_zero_denominator_are_dropped() -> None:
    found = bootstrap_ratio([0.5, 0.0], [1.0, 0.0])
    assert found == (0.5, 0.5, 0.5)
