"""Draw what `make demo` prints, in its second run, to docs/figures/demo.svg.

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

WIDTH, QUESTIONS = 120, 4
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "demo.svg"


def demo(home: str) -> str:
    """The output of one run, with its colours."""
    environment = {
        **os.environ,
        "BLOCKATTN_RAG_HOME": home,
        "FORCE_COLOR": "1",
        "COLUMNS": str(WIDTH),
    }
    done = subprocess.run(
        [sys.executable, "-m", "blockattn_rag", "demo"],
        env=environment, check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return done.stdout.replace(home, "~/.cache/blockattn_rag")


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        demo(home)
        parts = demo(home).rstrip().split("\n\n")
    shown = [*parts[: 1 + QUESTIONS], "...", parts[-1]]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere)
        console.print("$ make demo", highlight=False)
        console.print(Text.from_ansi("\n\n".join(shown)))
        console.save_svg(str(FIGURE), title="make demo, second run")
    print(FIGURE)


if __name__ == "__main__":
    main()
