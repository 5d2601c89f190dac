"""Markdown tables of the quality benchmark, with 95 % bootstrap intervals over questions."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from diagnosis import NOTHING, Change
from rows import FULL, Record
from tables import markdown

from blockattn_rag.lab.evaluation.metrics import bootstrap_mean, bootstrap_ratio

PLAIN = "block"


def tables(records: Sequence[Record]) -> str:
    """Format a table of all questions, and a table of correct answers by set."""
    by_row = _by_row(records)
    head: tuple[str, ...] = (
        "",
        "right",
        "difference (95 %)",
        "kept of full mode's",
        "F1",
        "KL (95 %)",
    )
    head += ("recovered (95 %)", "agreement", "computed", "first token", "times sooner")
    lines = [_line(name, rows, by_row) for name, rows in by_row.items()]
    return markdown(head, lines) + "\n" + _by_set(by_row)


Rows = dict[tuple[str, str], Record]


def _by_row(records: Sequence[Record]) -> dict[str, Rows]:
    by_row: dict[str, Rows] = {}
    for one in records:
        by_row.setdefault(one.row, {})[one.set, one.id] = one
    return by_row


LABELS = {
    FULL: "full mode",
    PLAIN: 'block mode as published (`"none"`)',
    "sink": 'sink (`"fast"`)',
    "head, 5 % recomputed": '5 % recomputed (`"head+recompute:0.05"`)',
    "head, 10 % recomputed": '10 % recomputed (`"head+recompute:0.1"`)',
    "head, 20 % recomputed": '20 % recomputed (`"head+recompute:0.2"`)',
    "recipe": "recipe",
    "recipe, 10 % recomputed": "recipe, 10 % recomputed",
    "recompute 10 %": "10 % recomputed, chosen by all layers",
    "recompute 20 %": "20 % recomputed, chosen by all layers",
    "recipe, recompute 10 %": "recipe, 10 % recomputed, chosen by all layers",
}
"""Rows of the summary, by name. The sink is omitted if there is a recipe, which includes it."""


def summary(records: Sequence[Record], repeated: Sequence[Record] = ()) -> str:
    """Format a short table for users: correct answers in percent, and speedup of the first token.

    Args:
        records: All answers of a model.
        repeated: Timed answers, including full mode, for rows whose records have no times.
    """
    by_row, again = _by_row(records), _by_row(repeated)
    hidden = {"sink"} if "recipe" in by_row else set()
    names = [name for name in LABELS if name in by_row and name not in hidden]
    head = ("", "right answers", "difference in points (95 %)", "full mode's right answers kept")
    lines = []
    for name in names:
        rows, full = by_row[name], by_row[FULL]
        label = LABELS[name] + f" ({len(rows)} questions)" * (len(rows) < len(full))
        right = statistics.fmean(one.right for one in rows.values())
        line = [label, f"{100 * right:.1f} %", "", "", ""]
        if name != FULL:
            change = bootstrap_mean([one.right - full[key].right for key, one in rows.items()])
            kept = [one.right for key, one in rows.items() if full[key].right]
            line[2] = "{:+.1f} ({:+.1f} to {:+.1f})".format(*(100 * x for x in change))
            line[3:] = [f"{sum(kept)} of {len(kept)}", _sooner(by_row, again, name)]
        lines.append(line)
    return markdown((*head, "first token: times sooner"), lines)


def _sooner(by_row: dict[str, Rows], again: dict[str, Rows], name: str) -> str:
    for source in (by_row, again):
        full, rows = source.get(FULL, {}), source.get(name, {})
        ratios = [full[key].ttft_s / one.ttft_s for key, one in rows.items() if key in full]
        ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
        if ratios:
            note = f" ({len(ratios)} questions)" * (len(ratios) < len(by_row[FULL]))
            return f"{statistics.median(ratios):.1f}{note}"
    return "not measured"


def _line(name: str, rows: Rows, by_row: dict[str, Rows]) -> list[str]:
    full, plain = by_row[FULL], by_row.get(PLAIN, {})
    right = [one.right for one in rows.values()]
    change = bootstrap_mean([one.right - full[key].right for key, one in rows.items()])
    kept = [one.right for key, one in rows.items() if full[key].right]
    size = len(rows)
    is_full = name == FULL
    measured = {key: one for key, one in rows.items() if not math.isnan(one.kl) and key in plain}
    kl = recovered = agreement = "-"
    if measured and not is_full:
        mean, low, high = bootstrap_mean([one.kl for one in measured.values()])
        kl = f"{mean:.3f} ({low:.3f} to {high:.3f})"
        agreement = f"{statistics.fmean(one.agreement for one in measured.values()):.0%}"
        if name != PLAIN:
            gained = [plain[key].kl - one.kl for key, one in measured.items()]
            share = bootstrap_ratio(gained, [plain[key].kl for key in measured])
            recovered = "{:.0%} ({:.0%} to {:.0%})".format(*share)
    computed = statistics.fmean(one.computed_tokens / one.prompt_tokens for one in rows.values())
    timed = [(full[key].ttft_s, one.ttft_s) for key, one in rows.items()]
    is_timed = not math.isnan(timed[0][1])
    return [
        name,
        f"{sum(right)} of {size}",
        "" if is_full else "{:+.0f} ({:+.0f} to {:+.0f})".format(*(size * x for x in change)),
        f"{sum(kept)} of {len(kept)}",
        f"{statistics.fmean(one.f1 for one in rows.values()):.2f}",
        kl,
        recovered,
        agreement,
        f"{computed:.0%}",
        f"{statistics.median(own for _, own in timed):.2f} s" if is_timed else "-",
        f"{statistics.median(a / b for a, b in timed):.1f}" if is_timed and not is_full else "-",
    ]


def _by_set(by_row: dict[str, Rows]) -> str:
    names = sorted({name for rows in by_row.values() for name, _ in rows})
    sizes = {name: sum(key[0] == name for key in by_row[FULL]) for name in names}
    lines = []
    for row, rows in by_row.items():
        line = [row]
        for name, size in sizes.items():
            right = [one.right for one in rows.values() if one.set == name]
            line.append(f"{sum(right)}" + f" of {len(right)}" * (len(right) < size))
        lines.append(line)
    return markdown(["right", *(f"{name}, of {size}" for name, size in sizes.items())], lines)


def diagnosis_table(changes: Sequence[Change], records: Sequence[Record]) -> str:
    """Format the share of divergence that each change removes, and the most attended passages.

    Args:
        changes: Diagnosis of some questions.
        records: Answers to the same questions, which show the answers lost by the recipe.
    """
    by_name: dict[str, dict[tuple[str, str], Change]] = {}
    for one in changes:
        by_name.setdefault(one.change, {})[one.set, one.id] = one
    base = by_name[NOTHING]
    lines = []
    for name, found in by_name.items():
        mean, low, high = bootstrap_mean([one.kl for one in found.values()])
        gained = [base[key].kl - one.kl for key, one in found.items()]
        share = bootstrap_ratio(gained, [base[key].kl for key in found])
        lines.append(
            [
                name,
                f"{mean:.3f} ({low:.3f} to {high:.3f})",
                "-" if name == NOTHING else "{:.0%} ({:.0%} to {:.0%})".format(*share),
                f"{statistics.fmean(one.agreement for one in found.values()):.0%}",
            ]
        )
    head = ("taken from full mode", "KL (95 %)", "removed of the recipe's KL (95 %)", "agreement")
    return markdown(head, lines) + "\n" + _attention([*base.values()], records)


def _attention(questions: Sequence[Change], records: Sequence[Record]) -> str:
    right = {(one.row, one.set, one.id): one.right for one in records}
    rows = {row for row, *_ in right}
    name = next((one for one in ("recipe", "sink") if one in rows), None)
    measured = [one for one in questions if one.attended >= 0]
    if not measured or name is None:
        return ""

    def lost(one: Change) -> bool:
        return right.get((FULL, one.set, one.id), 0) > right.get((name, one.set, one.id), 0)

    lines = []
    for label, chosen in (
        ("all", measured),
        ("lost by the recipe", [one for one in measured if lost(one)]),
    ):
        if chosen:
            lines.append(
                [
                    label,
                    str(len(chosen)),
                    str(sum(one.attended_in_full == one.best for one in chosen)),
                    str(sum(one.attended == one.best for one in chosen)),
                    str(sum(one.attended == one.attended_in_full for one in chosen)),
                ]
            )
    head = ("questions", "number", "most attention to the answer's passage: full mode", "recipe")
    return markdown([*head, "the same passage in both"], lines)
