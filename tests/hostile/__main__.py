"""``python -m tests.hostile --count 10000``: the whole campaign, and what it found."""

from __future__ import annotations

import argparse
import sys

from tests.hostile.campaign import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.hostile", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="conversations to ask")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="part of the names of the trials to run")
    parser.add_argument("--examples", type=int, default=20, help="faults to show in full")
    given = parser.parse_args()
    tally = run(given.count, given.seed, only=given.only)
    for name, count in sorted(tally.faults.items()):
        print(f"{count:6} {name}")
    for example in tally.examples[: given.examples]:
        print(example)
    print(tally)
    return bool(tally.faults)


if __name__ == "__main__":
    sys.exit(main())
