"""Draw the output of the second run of `make demo` to docs/figures/demo.svg.

python benchmarks/capture_demo.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH, QUESTIONS = 120, 6
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "demo.svg"


def demo(db: str) -> str:
    """Run the demo, and return its output with ANSI colors."""
    environment = {**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(WIDTH)}
    done = subprocess.run(
        [sys.executable, "-m", "blockattn_rag", "demo", "--db", db],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout.replace(db, "~/.cache/blockattn_rag/demo")


def draw(output: str) -> None:
    """Write the figure with the summary and the first questions, each with its two answers."""
    ingested, questions, summary, _ = output.rstrip().split("\n\n")
    first = questions.splitlines()[: 3 * QUESTIONS]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print("$ make demo", highlight=False)
        console.print(Text.from_ansi("\n".join([ingested, "", *first, "...", "", summary])))
        console.save_svg(str(FIGURE), title="make demo, second run")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo(folder)
        draw(demo(folder))
    print(FIGURE)


if __name__ == "__main__":
    main()
