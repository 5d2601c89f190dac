"""Judge the second run of the demo: right answers, and nothing computed that was stored."""

from __future__ import annotations

import json
import sys

MIN_RIGHT = {"smollm2": 1 / 3, "bundled": 0.9}
"""Share of right answers by model. SmolLM2 is right about every second time in both modes."""


def main() -> int:
    report = json.load(sys.stdin)
    summary, computed, model = report["summary"], report["ingest"]["computed"], report["model"]
    print(
        f"demo with {model}: of {summary['of']} answers, {summary['right_full']} right in full "
        f"mode and {summary['right_block']} in block mode; in the second run {computed} passages "
        f"computed, {summary['misses']} misses"
    )
    least = MIN_RIGHT[model] * summary["of"]
    if min(summary["right_full"], summary["right_block"]) < least or summary["of"] < 10:
        print(f"expected at least 10 questions, and {MIN_RIGHT[model]:.0%} right in both modes")
        return 1
    if summary["misses"] or computed:
        print("expected that the second run finds everything stored")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
