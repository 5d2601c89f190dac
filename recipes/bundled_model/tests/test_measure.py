from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from recipes.bundled_model import measure as module
from recipes.bundled_model.measure import main, markdown, measure
from tests.models import tiny_model, tiny_tokenizer


def test_every_kind_size_and_mode_has_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SIZES", (2, 3))
    tiny_model(max_position_embeddings=4096).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    rows = list(measure(str(tmp_path), samples=2, seed=1))
    assert len(rows) == 3 * 2 * 3
    modes = ("full", "block", "block-composite")
    assert {(row["mode"], row["samples"]) for row in rows} == {(mode, 2) for mode in modes}
    assert all(row["low"] <= row["accuracy"] <= row["high"] for row in rows)


def test_rows_are_kept_as_they_come_and_bad_options_refused_before_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"model": "bundled", "mode": "full", "kind": "order", "passages": 2,
           "accuracy": 1.0, "low": 1.0, "high": 1.0}  # fmt: skip
    asked: list[str] = []

    def one_row_and_a_crash(model: str, *_: int) -> Iterator[dict[str, Any]]:
        asked.append(model)
        yield row
        raise MemoryError

    monkeypatch.setattr(module, "measure", one_row_and_a_crash)
    output = tmp_path / "new" / "rows.json"
    with pytest.raises(FileNotFoundError, match="contains no model"):
        main(["bundled", str(tmp_path)], output=output)
    assert not asked
    with pytest.raises(MemoryError):
        main(["bundled"], output=output)
    assert asked == ["bundled"]
    assert json.loads(output.read_text(encoding="utf-8")) == [row]
    with pytest.raises(typer.BadParameter, match="exists; name another"):
        main(["bundled"], output=output)


def test_the_table_has_a_line_for_each_model_and_mode_and_a_dash_for_what_is_missing() -> None:
    row = {"model": "a/tuned", "mode": "block", "kind": "order", "passages": 5,
           "accuracy": 0.925, "low": 0.9, "high": 0.95}  # fmt: skip
    lines = markdown([row, {**row, "mode": "full", "accuracy": 1.0}]).splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| tuned | block | - |")
    assert "| 92.5 ± 2.5 |" in lines[2]
    assert "100.0" in lines[3]
