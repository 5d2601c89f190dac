"""Write the campaign's records to ``report.md``, which the documentation can include.

python benchmarks/gpu report --out benchmarks/results/gpu
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import STEPS, Record, outcome_of, read_records

from blockattn_rag.app.cli.output import duration, percent, size

GOAL_FLOOR_S, GOAL_OVER_FLOOR_S = 0.012, 0.006
"""Goals for the time to first token of the 8B shape with a context of 32,768 tokens on the device,
by the path that a GPU uses for a single request."""

GOAL_CASE = "8b/32768/"
PATHS = ("full", "copy", "relay", "floor")


def write_report(folder: Path, earlier: Path | None = None) -> None:
    """Write ``report.md`` to a folder of records. Missing steps are read from ``earlier``."""
    sections = []
    for step in STEPS:
        records = read_records(folder, step) or (read_records(earlier, step) if earlier else [])
        if text := section(step, records):
            sections.append(text)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text("\n".join(sections), "utf-8")


def section(step: str, records: Sequence[Record]) -> str:
    """Format a step: heading, machine, tables and failures. Empty if there are no records."""
    if not records:
        return ""
    last = {one["case"]: one for one in records}
    results = {case: one["result"] for case, one in last.items() if "result" in one}
    about = next(iter(last.values()))
    machine = about["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    where = f"{machine['accelerator'] or machine['processor']}; {versions}"
    dry = "**Dry run with tiny shapes: the figures mean nothing.** " if about["dry"] else ""
    lines = [f"### {step.replace('_', ' ').capitalize()}", "", f"{dry}*{where}*", ""]
    lines += TABLES[step](results)
    for case, one in last.items():
        if (outcome := outcome_of(one)) != "done":
            reason = one.get("out_of_memory") or one.get("error", "").strip().rpartition("\n")[2]
            lines += [f"- **{case}: {outcome}.** {reason}".rstrip()]
    return "\n".join([*lines, ""])


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Format a Markdown table, followed by an empty line. Empty if there are no rows."""
    if not rows:
        return []
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *lines, ""]


def cases_of(results: Mapping[str, Record], step: str) -> Iterator[tuple[list[str], Record]]:
    """Yield shape, context, block size and result for each case of a ``first_token`` step."""
    for case, row in results.items():
        shape, length, name = case.split("/")
        if name.partition(",")[0] == step:
            yield [shape, f"{int(length):,}", f"{row['block_tokens']:,}"], row


def correctness(results: Mapping[str, Record]) -> list[str]:
    """Format the largest error for each dtype and path, in multiples of its budget."""
    worst: dict[tuple[str, str], tuple[float, Record, str]] = {}
    for case, result in results.items():
        dtype = case.rpartition(", ")[2]
        for row in result["rows"]:
            ratio = row["error"] / row["budget"]
            kind = "recompute" if "recompute" in row["recipe"] else "recipe"
            key = dtype, row["path"] if row["recipe"] == "none" else f"{row['path']}, {kind}"
            if key not in worst or ratio > worst[key][0]:
                worst[key] = ratio, row, case
    rows = [
        (*key, f"{row['error']:.1e}", f"{row['budget']:.1e}", f"{ratio:.2f}", case, row["context"])
        for key, (ratio, row, case) in sorted(worst.items())
    ]
    heads = ("type", "path", "largest error", "budget", "of budget", "model", "context")
    return [f"{len(results)} cases.", "", *table(heads, rows)]


def first_token(results: Mapping[str, Record]) -> list[str]:
    named = ("shape", "context", "block")
    heads: Sequence[str] = (*named, *PATHS, "relay / copy")
    ways = ("full", "block", "recompute")
    lines = goals(results)
    for step, title in (
        ("request", "Time to first token as measured by a user:"),
        ("forward", "The model's part of it (CUDA events); `of limit`: multiples of the limit:"),
    ):
        rows: list[Sequence[object]] = []
        for what, row in cases_of(results, step):
            times = [duration(row.get(f"{path}_s")) for path in PATHS]
            rows.append((*what, *times, f"{row['relay_over_copy']:.2f}"))
            if step == "forward":
                rows.append(("", "", "of limit", *(over(row, path) for path in PATHS), ""))
        lines += [title, "", *table(heads, rows)]
    rows = [
        (*what, *(duration(row[f"{way}_s"]) for way in ways), f"{row['full_over_recompute']:.1f}")
        for what, row in cases_of(results, "recompute")
    ]
    if rows:
        title = "Time to first token with a tenth of the tokens recomputed:"
        lines += [title, "", *table((*named, *ways, "full / recompute"), rows)]
    rows = [
        (*what, duration(row["assembly_s"]), duration(row["limit_s"]))
        for what, row in cases_of(results, "assembly")  # now measured by the step `kernel_times`
    ]
    if rows:
        title = "Joining and rotating keys and values, a part of copy:"
        lines += [title, "", *table((*named, "assembly", "limit"), rows)]
    rows = [
        (*what, *(f"{row[f'{path}_tokens_per_s']:.1f}" for path in PATHS[:3]),
         f"{1 / row['limit_s']:.1f}")
        for what, row in cases_of(results, "decode")
    ]  # fmt: skip
    heads = (*named, *PATHS[:3], "limit")
    lines += ["Tokens per second after the first:", "", *table(heads, rows)]
    rows = [
        (*what, *(size(row[f"{path}_peak_bytes"]) for path in PATHS[:3]), size(row["stored_bytes"]))
        for what, row in cases_of(results, "memory")
    ]
    heads = (*named, *PATHS[:3], "stored blocks")
    return [*lines, "Memory of one more request:", "", *table(heads, rows)]


def graphs(results: Mapping[str, Record]) -> list[str]:
    rows = []
    for case, row in results.items():
        shape, length, name = case.split("/")
        times = duration(row["launches_s"]), duration(row["graphs_s"]), duration(row["limit_s"])
        ratio = f"{row['launches_s'] / row['graphs_s']:.2f}" if row["has_graphs"] else "no graphs"
        rows.append((shape, f"{int(length):,}", name, *times, ratio))
    heads = ("shape", "context", "forward", "launches", "graphs", "limit", "launches / graphs")
    return table(heads, rows)


def kernel_times(results: Mapping[str, Record]) -> list[str]:
    rows: list[Sequence[object]] = []
    for case, row in results.items():
        ends = ("_s", "_min_s", "_max_s")
        names = [key[:-2] for key in row if key.endswith("_s") and not key.endswith(ends[1:])]
        limit = row["limit_s"]
        for name in names:
            if name != "limit":
                taken = row[f"{name}_s"]
                times = f"{taken * 1e6:,.0f} µs", f"{limit * 1e6:,.0f} µs"
                rows.append((case, name, *times, f"{taken / limit:.1f}"))
    heads = ("case", "kernel", "time", "limit", "of limit")
    return table(heads, rows)


def over(row: Record, path: str) -> str:
    return f"{row[f'{path}_s'] / row[f'{path}_limit_s']:.1f}" if f"{path}_s" in row else "-"


def goals(results: Mapping[str, Record]) -> list[str]:
    """Format whether each goal was met, by the engine's time and by the model's share of it."""
    rows = []
    for step in ("request", "forward"):
        row = results.get(GOAL_CASE + step)
        if row is None:
            continue
        for name, found, goal in (
            ("floor", row["floor_s"], GOAL_FLOOR_S),
            ("relay over floor", row["relay_s"] - row["floor_s"], GOAL_OVER_FLOOR_S),
        ):
            shown = duration(found), duration(goal)
            rows.append((step, name, *shown, "met" if found <= goal else "**missed**"))
    if not rows:
        return ["Goals of 8B with 32,768 tokens: not measured.", ""]
    heads = ("8B, 32,768 tokens", "what", "found", "at most", "goal")
    return table(heads, rows)


def shared_prompt(results: Mapping[str, Record]) -> list[str]:
    rows = []
    for case, row in results.items():
        rates = [f"{row[f'{way}_tokens_per_s']:.0f}" for way in ("unshared", "shared")]
        gains = [f"{row[key]:.2f}" for key in ("gain", "decode_gain", "limit_gain", "bytes_ratio")]
        rows.append((case, row["system_tokens"], *rates, *gains))
    return table(
        ("shape", "shared tokens", "unshared tokens/s", "shared tokens/s", "gain",
         "gain of decoding", "limit, weights counted", "equation 10"),
        rows,
    )  # fmt: skip


def transfer(results: Mapping[str, Record]) -> list[str]:
    rows: list[Sequence[object]] = []
    for case, row in results.items():
        if case == "ceiling":
            rows += [(case, way.removesuffix("_bytes_per_s"), "-", "-", gigabytes(rate), "-")
                     for way, rate in row.items()]  # fmt: skip
            continue
        for tier in ("device", "host", "page cache", "disk"):
            times = duration(row[f"{tier}_s"]), duration(row[f"{tier}_fetch_s"])
            rate, hidden = row.get(f"{tier}_bytes_per_s"), row.get(f"{tier}_overlap")
            rows.append((case, tier, *times, gigabytes(rate), percent(hidden)))
    return table(("shape", "blocks in", "first token", "fetch", "GB/s", "% of fetch hidden"), rows)


def gigabytes(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.1f}"


def profiling(results: Mapping[str, Record]) -> list[str]:
    lines: list[str] = []
    for case, row in results.items():
        limit = row["over_limit"]
        slow = f", {limit:.1f} times its limit where it was measured" if limit else ""
        lines += [f"**{case}**: {duration(row['total_s'])}{slow}; {row['launches']} launches.", ""]
        shares = [(name, percent(share)) for name, share in row["shares"].items()]
        lines += table(("where the time goes", "%"), shares)
        kernels: list[Sequence[Any]] = [
            (
                f"`{one['name'][:90]}`".replace("|", "/"),
                one["group"],
                duration(one["s"]),
                one["calls"],
            )
            for one in row["kernels"]
        ]
        lines += table(("kernel", "group", "time", "calls"), kernels)
        lines += ["What to change:", "", *(f"- {change}" for change in row["advice"]), ""]
    return lines


TABLES = {
    "correctness": correctness,
    "first_token": first_token,
    "graphs": graphs,
    "kernel_times": kernel_times,
    "shared_prompt": shared_prompt,
    "transfer": transfer,
    "profiling": profiling,
}
