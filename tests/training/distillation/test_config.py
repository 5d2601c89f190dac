from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blockattn_rag.training.distillation.config import AdaptConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fit": "writer"}, "fit must be of .*'reader', 'merge'.*, found 'writer'"),
        ({"samples": 0}, "samples is 0, expected 1 or more"),
        ({"seed": -1}, "seed is -1, expected 0 or more"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0, expected above 0"),
        ({"epochs": float("nan")}, "epochs is nan, expected above 0"),
        ({"held_out": 1.0}, "held_out is 1.0, expected above 0 and below 1"),
        ({"adam_beta2": 1.0}, "adam_beta2 is 1.0, expected 0 to below 1"),
        ({"min_passages": 6}, "min_passages is 6, expected at most max_passages"),
        ({"fit": "merge", "merge": "scale:0.9"}, "where a merge is fitted"),
        ({"fit": "correction", "sink": "first-block"}, "the same for all prompts: .*'head:4'"),
        ({"output": "."}, "output must name a folder"),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptConfig(**{"output": "out", **settings})


def test_learning_rates_are_those_of_what_is_trained_unless_given() -> None:
    assert AdaptConfig("out").peak_learning_rate == 5e-4
    assert AdaptConfig("out", fit="merge").peak_learning_rate == 1e-2
    assert AdaptConfig("out", fit="merge", learning_rate=0.1).peak_learning_rate == 0.1


def test_where_things_lie_decides_no_result() -> None:
    one = AdaptConfig("one", answers=Path("here"), store_bytes=1, resume=True)
    assert one.decisive() == AdaptConfig("two").decisive()
    assert AdaptConfig("one", rank=8).decisive() != AdaptConfig("one").decisive()
