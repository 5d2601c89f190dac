"""``blockattn-rag eval``: what each attention mode costs in accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from blockattn_rag.cli.fidelity import show_fidelity
from blockattn_rag.cli.figures import count, duration, percent
from blockattn_rag.cli.files import drawable
from blockattn_rag.cli.output import JsonOption, ModelArgument, emit, note, progress, table, working
from blockattn_rag.rag.model_names import existing_model, loading

if TYPE_CHECKING:
    from blockattn_rag.evaluation import EvaluationReport, ModeResult

_MODES = "full,block"


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
            help="Of full, block, block-composite, closed-book, options of block mode such as "
            "sink=head:4 or sink=head:4+promote=attention:1, and calibrated=FILE with the settings "
            "that `calibrate` wrote there; commas between."
        ),
    ] = _MODES,
    prompt_format: Annotated[
        str,
        typer.Option(
            help="auto (a known checkpoint's own, else chat), chat (the model's own template), "
            "block-attention, turborag, tulu3-block, llama3-block or kvlink."
        ),
    ] = "auto",
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
    diagnosis: Annotated[
        bool,
        typer.Option(
            "--diagnosis",
            help="Swap parts of full mode's keys and values into block mode's, and compare as "
            "--fidelity does: what each repair can reach, and which layers part.",
        ),
    ] = False,
    sink: Annotated[
        str | None,
        typer.Option(help="With --diagnosis: what passages are encoded after, such as head:4."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="With --diagnosis: draw it to this file (svg, png, pdf).", callback=drawable
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer questions over their passages in each mode and score the answers."""
    _check_together(modes, fidelity, diagnosis, sink, plot)
    with working(as_json):
        from blockattn_rag import evaluation
        from blockattn_rag.engine.engine import BlockAttentionEngine

        samples = evaluation.read_samples(data, limit=limit)
        with loading(model):
            # Each mode computes all of its own answer: no tails of another's (engine.tails).
            engine = BlockAttentionEngine.from_pretrained(
                model, device=device, dtype=dtype, resident_bytes=0
            )
        names = [name.strip() for name in modes.split(",")]
        settings: dict[str, Any] = {
            "prompt": prompt_format,
            "num_passages": num_passages,
            "max_new_tokens": max_new_tokens,
            "records_path": output,
            "settings": {"model": model, "data": data.name},
        }
        with progress("comparing" if fidelity or diagnosis else "answering") as tick:
            compared = report = None
            if diagnosis:
                settings["sink"] = sink or "none"
                compared = evaluation.diagnose(engine, samples, **settings, on_progress=tick)
            elif fidelity:
                compared = evaluation.measure_fidelity(
                    engine, samples, names, **settings, on_progress=tick
                )
            else:
                report = evaluation.evaluate(
                    engine,
                    samples,
                    names,
                    **settings,
                    batch_size=batch_size,
                    on_progress=lambda mode, done, total: tick(
                        names.index(mode) * total + done, len(names) * total
                    ),
                )
        if plot and compared:
            evaluation.plot_diagnosis(compared, plot)
    title = f"{model} on {data.name}"
    if compared:
        show_fidelity(as_json, title, compared, diagnosis=diagnosis)
    if report:
        _show(as_json, title, report, max_new_tokens)


def _check_together(
    modes: str, fidelity: bool, diagnosis: bool, sink: str | None, plot: Path | None
) -> None:
    """Refuse options that do not go together."""
    if diagnosis and fidelity:
        raise typer.BadParameter("--diagnosis and --fidelity exclude each other")
    if diagnosis and modes != _MODES:
        raise typer.BadParameter("--diagnosis has no modes; compare modes with --fidelity --modes")
    if plot and not diagnosis:
        raise typer.BadParameter("--plot draws a diagnosis; add --diagnosis")
    if sink is not None and not diagnosis:
        raise typer.BadParameter(
            f"--sink is for --diagnosis; sinks are modes otherwise: --modes full,sink={sink}"
        )


def _show(as_json: bool, title: str, report: EvaluationReport, max_new_tokens: int) -> None:
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
