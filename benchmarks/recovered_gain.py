"""Calculate KVShareArena's recovered gain from the answers recorded for this package.

    python benchmarks/recovered_gain.py    # writes benchmarks/results/recovered-gain.md

Recovered gain = (score - score without passages) / (score of full mode - score without passages),
over the 966 questions from Natural Questions that SmolLM2 answered in every row of
``results/stock-smollm2.csv`` and ``results/stock-smollm2-fits.csv``. The script runs no model.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from blockattn_rag.lab.evaluation.metrics import Interval, bootstrap_ratio

RESULTS = Path(__file__).parent / "results"
FULL, NONE = "full", "closed-book"
ROWS = {
    "block": "block mode as published (`none`)",
    "sink=head:4": "a sink (`head:4`)",
    "sink=head:4+correction=kv-trained/correction.safetensors": "the package's recipe",
}
Scores = Mapping[str, Mapping[str, tuple[float, float]]]


def read(folder: Path = RESULTS) -> Scores:
    """Return the F1 and the correctness (0 or 1) of each answer, by row and question."""
    scores: dict[str, dict[str, tuple[float, float]]] = {}
    for name in ("stock-smollm2.csv", "stock-smollm2-fits.csv"):
        with (folder / name).open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if line["f1"]:  # Rows that only report divergence have no scores.
                    pair = float(line["f1"]), float(line["accuracy"])
                    scores.setdefault(line["mode"], {})[line["id"]] = pair
    return scores


def recovered(scores: Scores, row: str, measure: int) -> Interval:
    """Return the recovered gain of a row, with its 95 % bootstrap interval over questions.

    Args:
        measure: 0 for F1, 1 for correct answers.

    Raises:
        ValueError: The questions of the row and the references differ.
    """
    if not scores[row].keys() == scores[FULL].keys() == scores[NONE].keys():
        raise ValueError(f"{row!r} has different questions from {FULL!r} and {NONE!r}")
    ids = sorted(scores[row])
    above = [scores[row][i][measure] - scores[NONE][i][measure] for i in ids]
    gains = [scores[FULL][i][measure] - scores[NONE][i][measure] for i in ids]
    return bootstrap_ratio(above, gains)


def table(scores: Scores) -> str:
    """Format the rows as a Markdown table."""
    lines = [
        "| row | questions | recovered gain by F1 | recovered gain by right answers |",
        "|---|---|---|---|",
    ]
    for row, label in ROWS.items():
        cells = [
            "{:.2f} ({:.2f} to {:.2f})".format(*recovered(scores, row, measure))
            for measure in (0, 1)
        ]
        lines.append(f"| {label} | {len(scores[row])} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (RESULTS / "recovered-gain.md").write_text(table(read()), encoding="utf-8")
