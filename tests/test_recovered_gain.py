"""The table of recovered gain is computed from the answers stored in the repository."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import recovered_gain  # noqa: E402


def test_the_table_matches_the_stored_answers() -> None:
    written = (ROOT / "benchmarks/results/recovered-gain.md").read_text("utf-8")
    assert recovered_gain.table(recovered_gain.read()) == written
    assert "| 966 |" in written


def test_recovered_gain_is_the_share_of_the_gain_from_passages() -> None:
    scores = {
        "full": {"a": (1.0, 1.0), "b": (0.5, 1.0)},
        "closed-book": {"a": (0.0, 0.0), "b": (0.5, 0.0)},
        "row": {"a": (0.25, 1.0), "b": (0.5, 0.0)},
    }
    assert recovered_gain.recovered(scores, "row", 0).mean == pytest.approx(0.25)
    assert recovered_gain.recovered(scores, "row", 1).mean == pytest.approx(0.5)


def test_rows_of_other_questions_are_refused() -> None:
    scores = {name: {"a": (0.0, 0.0)} for name in ("full", "closed-book")} | {"row": {}}
    with pytest.raises(ValueError, match="different questions"):
        recovered_gain.recovered(scores, "row", 0)
