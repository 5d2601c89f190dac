"""Pages about other projects give a source for every claim."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def tables(page: str) -> list[list[list[str]]]:
    """Return the rows of all tables of a page, without headers, as lists of cells."""
    text = (DOCS / page).read_text("utf-8")
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    rows = [[line.strip("|").split("|") for line in table.splitlines()[2:]] for table in found]
    return [[[cell.strip() for cell in row] for row in table] for table in rows]


def test_every_project_of_the_comparison_has_a_dated_source() -> None:
    reuses, answers, sources = tables("comparison.md")
    names = {row[0] for row in reuses}
    assert len(names) >= 7
    text = " ".join(row[0] for row in sources)
    for name in names | {row[0] for row in answers}:
        assert name.split(",")[0].split()[-1] in text, name
    for row in sources:
        assert re.search(r"\b202\d\b|this version", row[2]), row


def test_quoted_results_have_a_date_and_our_own_results_a_command() -> None:
    text = (DOCS / "reuse_or_nothing.md").read_text("utf-8")
    assert "2026-09-10" in text
    assert "**-0.63**" in text
    assert "python benchmarks/recovered_gain.py" in text
    assert "## What is not known" in text
