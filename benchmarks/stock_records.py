"""Records of ``stock_models.py``, a row for each question and mode, and the tables made of them."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from blockattn_rag.evaluation.metrics import Interval, bootstrap_mean, bootstrap_ratio

FULL = "full"


@dataclass(frozen=True)
class Row:
    """One question in one mode: divergence from full mode (nats), and scores of its own answer.

    ``accuracy`` and ``f1`` are None where the mode did not answer; ``tokens`` are those of full
    mode's answer, along which ``kl``, ``first_kl`` and ``agreement`` are told. ``setup`` tells
    apart what the mode's name does not: the model, the prompts, and what its files hold.
    """

    id: str
    mode: str
    setup: str
    tokens: int
    kl: float
    first_kl: float
    agreement: float
    accuracy: float | None = None
    f1: float | None = None

    @classmethod
    def read(cls, line: dict[str, str]) -> Row:
        number: dict[str, Any] = {
            name: float(line[name]) if line[name] else None for name in _NUMBERS
        }
        return cls(line["id"], line["mode"], line["setup"], int(line["tokens"]), **number)

    def written(self) -> dict[str, Any]:
        values = asdict(self)
        return {n: f"{v:.5g}" if isinstance(v, float) else v for n, v in values.items()}


_FIELDS = [field.name for field in fields(Row)]
_NUMBERS = _FIELDS[4:]


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; a last line that was cut off is left out."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [Row.read(line) for line in csv.DictReader(whole)]


def append_rows(path: Path, rows: Sequence[Row], known: Sequence[Row]) -> None:
    """Add rows to a file that holds the known ones, and perhaps a line that was cut off."""
    is_whole = path.exists() and path.read_bytes().endswith(b"\n")
    with path.open("a" if is_whole else "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _FIELDS, lineterminator="\n")
        if not is_whole:
            writer.writeheader()
            writer.writerows(row.written() for row in known)
        writer.writerows(row.written() for row in rows)


def tables(rows: Iterable[Row], costs: Path | None, modes: Sequence[str]) -> Iterator[str]:
    """The lines of two tables in Markdown, of divergence and of scores, with 95 % intervals.

    Args:
        costs: file of ``stock_models.py costs``; None for none.
        modes: those to show beside full mode; empty for all.
    """
    by_mode: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_mode.setdefault(row.mode, {})[row.id] = row
    cost = _read_costs(costs) if costs else {}
    shown = modes or [mode for mode in by_mode if mode != FULL]
    if missing := [mode for mode in (FULL, "block", *shown) if mode not in by_mode]:
        raise ValueError(f"the records hold no rows of {', '.join(missing)}; measure them, too")
    yield "| mode | questions | KL | first token | agreement | recovered | tokens | first token |"
    yield "|---|---|---|---|---|---|---|---|"
    for mode in [FULL, *shown]:
        cells = [*_divergence(by_mode[mode], by_mode["block"]), *cost.get(mode, ("", ""))]
        yield "| " + " | ".join([f"`{_named(mode)}`", *cells]) + " |"
    yield "\n| mode | questions | right | less full mode's | F1 | less full mode's |"
    yield "|---|---|---|---|---|---|"
    for mode in [FULL, *shown]:
        told = {name: row for name, row in by_mode[mode].items() if row.accuracy is not None}
        if told:
            yield "| " + " | ".join([f"`{_named(mode)}`", *_scores(told, by_mode[FULL])]) + " |"


def _named(mode: str) -> str:
    """A mode without the names of files within the folders that `blockattn-rag adapt` makes."""
    return mode.replace("/correction.safetensors", "").replace("/merge.safetensors", "")


def _divergence(rows: dict[str, Row], block: dict[str, Row]) -> list[str]:
    kl, first = ([getattr(row, name) for row in rows.values()] for name in ("kl", "first_kl"))
    agreement = bootstrap_mean([row.agreement for row in rows.values()])
    both = [(block[name].kl, row.kl) for name, row in rows.items() if name in block]
    lost = [of_block - of_mode for of_block, of_mode in both]
    # The floor, some 1e-12, is left out: full attention in two steps differs by rounding alone.
    recovered = bootstrap_ratio(lost, [of_block for of_block, _ in both]) if any(lost) else None
    return [
        str(len(rows)),
        _shown(bootstrap_mean(kl), ".3f"),
        f"{statistics.fmean(first):.3f}",
        _shown(agreement, ".0%"),
        _shown(recovered, ".0%") if recovered else "",
    ]


def _scores(rows: dict[str, Row], full: dict[str, Row]) -> list[str]:
    cells = [str(len(rows))]
    for name in ("accuracy", "f1"):
        scores = {id: getattr(row, name) for id, row in rows.items()}
        apart = [score - getattr(full[id], name) for id, score in scores.items()]
        cells += [_shown(bootstrap_mean([*scores.values()]), ".1%")]
        cells += [_shown(bootstrap_mean(apart), "+.1%") if any(apart) else ""]
    return cells


def _shown(found: Interval, form: str) -> str:
    mean, low, high = (format(value, form).replace("%", " %") for value in found)
    return f"{mean} ({low.removesuffix(' %')} to {high.removesuffix(' %')})"


def _read_costs(path: Path) -> dict[str, tuple[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    return {
        line["mode"]: (f"{float(line['computed_tokens']):.0f}", f"{float(line['ttft_s']):.2f} s")
        for line in lines
    }
