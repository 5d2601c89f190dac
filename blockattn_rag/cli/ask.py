"""``blockattn-rag ask``: a question to a database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag.cli.figures import count, duration
from blockattn_rag.cli.output import JsonOption, ServerOption, emit, note, piece, working
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.rag.ask import Answer, Assistant
from blockattn_rag.rag.database import Database
from blockattn_rag.rag.model_names import existing_model

ModeOption = Annotated[
    Mode, typer.Option(help="block reuses stored passages; full computes everything.")
]


def _known_option(parameter: typer.CallbackParam, value: str | None) -> str | None:
    """Refuse an option of block mode before a model is loaded."""
    if value is None:
        return None
    from blockattn_rag.engine.options import checked_option

    try:
        found: str | None = checked_option(str(parameter.name), value)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from error
    return found


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    db: Annotated[Path, typer.Option(help="Database folder, made by `blockattn-rag ingest`.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Another model than the one the passages were encoded by.", callback=existing_model
        ),
    ] = None,
    server: ServerOption = None,
    mode: ModeOption = "block",
    promote: Annotated[
        str | None,
        typer.Option(
            help="Passages to compute anew, seeing all others, for models that are not block-fine-"
            "tuned: a number from the best on, last:N or attention:N.",
            callback=_known_option,
        ),
    ] = None,
    correction: Annotated[
        str | None,
        typer.Option(
            help="File of a correction of passages' keys and values, fitted to the database's "
            "sink; passages are encoded again when they are first used.",
            callback=_known_option,
        ),
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(
            help="How attention to passages is weighted: scale:0.95, bias:-0.5 or the file of a "
            "learned merge.",
            callback=_known_option,
        ),
    ] = None,
    reader: Annotated[
        str | None, typer.Option(help="Folder of a reader adapter.", callback=_known_option)
    ] = None,
    retry: Annotated[
        str | None,
        typer.Option(
            help="How to answer again when the answer says that it is not in the passages: full or "
            "promote:2.",
            callback=_known_option,
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=200, help="Passages to retrieve.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the ingested passages; then the sources, and what was reused."""
    with working(as_json):
        if not question.strip():
            raise typer.BadParameter("the question is empty", param_hint="QUESTION")
        database = Database.open(db, model=model, server=server, device=device, dtype=dtype)
        if not database.collection.count():
            raise ValueError(f"{db} holds no passage; run `blockattn-rag ingest PATH --db {db}`")
        assistant = Assistant(
            database,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            correction=correction,
            merge=merge,
            promote=promote,
            reader=reader,
            retry=retry,
        )
        answer = assistant.ask(question, mode=mode, on_text=None if as_json else piece)
        if not as_json:
            piece(_cut_off(answer) + "\n")
    if misses := answer.stats.misses:
        one = misses == 1
        note(
            f"note: {count(misses, 'block')} {'was' if one else 'were'} computed now; "
            "passages are stored for the next question"
        )
    emit(as_json, answer.to_dict(), "", *_sources(answer), *_figures(answer.stats))


def _cut_off(answer: Answer) -> str:
    """What stands behind an answer that did not come to its end."""
    if answer.finish_reason != "length":
        return ""
    tokens = count(answer.stats.generated_tokens, "token")
    return f" ... [cut off after {tokens}: --max-new-tokens, or the end of the context window]"


def _sources(answer: Answer) -> list[str]:
    lines = []
    for number, source in enumerate(answer.sources, 1):
        page = f"page {source.page}" if source.page else ""
        name = " ".join(filter(None, (source.source, page, source.title)))
        score = "" if source.score is None else f" ({source.score:.2f})"
        text = " ".join(source.text.split())
        lines.append(f"[{number}] {name}{score}: {text[:100]}{'...' if len(text) > 100 else ''}")
    return lines


def _figures(stats: ReuseStats) -> list[str]:
    """What an answer reused, and what is known of answers like it."""
    known = stats.certificate
    return [_reuse_line(stats), *([f"calibrated with {known}"] if known else [])]


def _reuse_line(stats: ReuseStats) -> str:
    """What an answer reused, in one line."""
    tokens = count(stats.prompt_tokens, "prompt token")
    first = f"first token after {duration(stats.ttft_s)}"
    if stats.mode == "full":
        return f"full mode: nothing reused, {tokens} computed; {first}"
    promoted = f", {stats.promoted_tokens:,} promoted" if stats.promoted_tokens else ""
    int8 = f" ({stats.int8_blocks} in int8)" if stats.int8_blocks else ""
    retried = "" if stats.retried == "none" else f"; answered again: {stats.retried}"
    return (
        f"block mode: {count(stats.hits, 'block')} reused, {stats.misses} computed{int8}; "
        f"{stats.reused_tokens:,} of {tokens} reused{promoted}; {first}{retried}"
    )
