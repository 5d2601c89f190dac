"""Judge the second run of the demo: right answers, and nothing computed that was stored."""

from __future__ import annotations

import json
import sys

MIN_RIGHT = 0.9


def main() -> int:
    questions = json.load(sys.stdin)["questions"]
    right = sum(question["correct"] for question in questions)
    misses = sum(question["misses"] for question in questions)
    print(f"demo: {right} of {len(questions)} right, {misses} misses in the second run")
    if len(questions) < 10 or right < MIN_RIGHT * len(questions) or misses:
        print(f"expected at least 10 questions, {MIN_RIGHT:.0%} right, and 0 misses")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
