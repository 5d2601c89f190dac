"""Evaluation records for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def record(number: int) -> dict[str, Any]:
    """Return an evaluation record with two distractor passages and the gold one."""
    return {
        "id": f"q{number}",
        "question": f"How high is Tower {number}?",
        "answers": [f"{number}00 metres"],
        "passages": [
            {"title": f"Other {number}", "text": "A lake is deep.", "gold": False},
            {"title": "", "text": f"River {number} is long.", "gold": False},
            {"title": f"Tower {number}", "text": f"It is {number}00 metres high.", "gold": True},
        ],
    }


def write_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path
