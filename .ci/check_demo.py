"""Check the second run of the demo: correct answers, and no stored passage encoded again."""

from __future__ import annotations

import json
import sys

MIN_RIGHT = {"smollm2": 1 / 3, "bundled": 0.9}
"""Minimum accuracy by model. SmolLM2 answers about half of the questions correctly in each mode."""


def main() -> int:
    report = json.load(sys.stdin)
    summary, computed, model = report["summary"], report["ingest"]["computed"], report["model"]
    print(
        f"Demo with {model}: of {summary['of']} answers, {summary['right_full']} correct in full "
        f"mode and {summary['right_block']} in block mode; second run: {computed} passages "
        f"encoded, {summary['misses']} misses"
    )
    least = MIN_RIGHT[model] * summary["of"]
    if min(summary["right_full"], summary["right_block"]) < least or summary["of"] < 10:
        print(f"Expected at least 10 questions, and {MIN_RIGHT[model]:.0%} correct in both modes")
        return 1
    if summary["misses"] or computed:
        print("Expected the second run to reuse every stored passage")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
