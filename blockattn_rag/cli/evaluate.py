"""``blockattn-rag eval``: what each attention mode costs in accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from blockattn_rag.cli.figures import count, duration, percent
from blockattn_rag.cli.output import JsonOption, ModelArgument, emit, note, progress, table, working
from blockattn_rag.rag.model_names import existing_model, loading

if TYPE_CHECKING:
    from blockattn_rag.evaluation import EvaluationReport, FidelityReport, ModeResult


def evaluate(
    model: Annotated[str, typer.Option(help=ModelArgument, callback=existing_model)],
    data: Annotated[
        Path,
        typer.Option(
            help="Questions, .jsonl or .jsonl.gz; a line: "
            '{"id": "1", "question": "...", "answers": ["..."], '
            '"passages": [{"title": "...", "text": "...", "gold": true}]}'
        ),
    ],
    modes: Annotated[
        str,
        typer.Option(
            help="Of full, block, block-composite, closed-book and sink=SINK (such as "
            "sink=head:4); commas between."
        ),
    ] = "full,block",
    prompt_format: Annotated[
        str, typer.Option(help="chat (the model's own template), block-attention or turborag.")
    ] = "chat",
    num_passages: Annotated[
        int | None, typer.Option(min=1, help="Passages a question, the gold ones among them.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first questions.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 48,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Questions answered at once; 1 shows times to first token.")
    ] = 8,
    output: Annotated[
        Path | None,
        typer.Option(help="Keep every answer in this JSONL file; a stopped run goes on from it."),
    ] = None,
    fidelity: Annotated[
        bool,
        typer.Option(
            "--fidelity",
            help="Compare each mode's predictions with full mode's along full mode's answer; the "
            "right answers are not used.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer questions over their passages in each mode and score the answers."""
    with working(as_json):
        from blockattn_rag.engine.engine import BlockAttentionEngine
        from blockattn_rag.evaluation import evaluate as run
        from blockattn_rag.evaluation import measure_fidelity, read_samples

        samples = read_samples(data, limit=limit)
        with loading(model):
            engine = BlockAttentionEngine.from_pretrained(model, device=device, dtype=dtype)
        names = [name.strip() for name in modes.split(",")]
        settings: dict[str, Any] = {
            "prompt": prompt_format,
            "num_passages": num_passages,
            "max_new_tokens": max_new_tokens,
            "records_path": output,
            "settings": {"model": model, "data": data.name},
        }
        with progress("comparing" if fidelity else "answering") as tick:
            if fidelity:
                compared = measure_fidelity(engine, samples, names, **settings, on_progress=tick)
            else:
                report = run(
                    engine,
                    samples,
                    names,
                    **settings,
                    batch_size=batch_size,
                    on_progress=lambda mode, done, total: tick(
                        names.index(mode) * total + done, len(names) * total
                    ),
                )
    title = f"{model} on {data.name}"
    if fidelity:
        emit(as_json, compared.to_dict(), _fidelity_table(title, compared), *_FIDELITY_LEGEND)
        return
    tables = [_table(title, report.results)]
    tables += [_table(f"of these: {kind}", rows) for kind, rows in report.by_kind.items()]
    emit(as_json, report.to_dict(), *tables, *_legend(report.results))
    if report.cut_off:
        _note_cut_off(report, max_new_tokens)


def _note_cut_off(report: EvaluationReport, max_new_tokens: int) -> None:
    modes = ", ".join(f"{r.cut_off} in {r.mode}" for r in report.results if r.cut_off)
    note(
        f"cut off: {report.cut_off} of {count(len(report.records), 'answer')} ({modes}), after "
        f"{count(max_new_tokens, 'token')} (--max-new-tokens) or where the context window "
        "ended, maybe before what was asked"
    )


_FIDELITY_LEGEND = (
    "KL: divergence from full mode's predictions in nats, mean over the answer's tokens, and that",
    "of the first; agree: tokens that the mode would choose too; same: answers that it would give",
    "too; recovered: how much of block mode's divergence is gone. In percent, 95 % intervals. The",
    "floor is full attention computed in two steps: what rounding alone does.",
)


def _fidelity_table(title: str, report: FidelityReport) -> RenderableType:
    columns = ("mode", "KL (95 %)", "first KL", "agree", "same", "recovered (95 %)")
    rows = [
        (
            row.mode,
            f"{row.kl.mean:.4f} ({row.kl.low:.4f}-{row.kl.high:.4f})",
            f"{row.first_kl.mean:.4f}",
            percent(row.agreement.mean),
            percent(row.identical.mean),
            "-" if row.recovery is None else "{} ({} to {})".format(*map(percent, row.recovery)),
        )
        for row in report.results
    ]
    questions = count(report.results[0].samples, "question")
    return table(f"{title}, {questions}", columns, rows)


def _legend(results: list[ModeResult]) -> list[str]:
    """What the columns hold."""
    return [
        "In percent. accuracy: an answer occurs in the output, and where its mean lies (95 %);",
        "exact: the output is one; F1: words shared with an answer; diff: accuracy less that of",
        "full mode; same: outputs equal to those of full mode; reused: prompt tokens whose keys",
        "and values were found.",
        "TTFT: time to the first token, median."
        if _are_timed(results)
        else "Times are told with --batch-size 1: in a batch, all wait for the whole batch.",
    ]


def _are_timed(results: list[ModeResult]) -> bool:
    return all(result.ttft_s is not None for result in results)


def _table(title: str, results: list[ModeResult]) -> RenderableType:
    times = ("TTFT",) if _are_timed(results) else ()
    columns = ("mode", "accuracy (95 %)", "exact", "F1", "diff", "same", *times, "reused")
    rows = [_row(result) for result in results]
    return table(f"{title}, {count(results[0].samples, 'question')}", columns, rows)


def _row(result: ModeResult) -> tuple[str, ...]:
    stats = result.stats
    mean, low, high = result.accuracy
    return (
        result.mode,
        f"{percent(mean)} ({percent(low)}-{percent(high)})",
        percent(result.exact_match.mean),
        percent(result.f1.mean),
        "-" if result.difference is None else f"{result.difference.mean * 100:+.1f}",
        percent(result.agreement),
        *(() if result.ttft_s is None else (duration(result.ttft_s),)),
        percent(stats.reused_tokens / stats.prompt_tokens if stats.prompt_tokens else None),
    )
