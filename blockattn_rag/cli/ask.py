"""``blockattn-rag ask``: a question to a database."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag.cli.output import JsonOption, count, duration, emit, note, piece, working
from blockattn_rag.rag.ask import Answer, Assistant
from blockattn_rag.rag.database import Database
from blockattn_rag.rag.model_names import existing_model


class Mode(StrEnum):
    """How the model attends to the passages."""

    block = "block"
    full = "full"


ModeOption = Annotated[
    Mode, typer.Option(help="block reuses stored passages; full computes everything.")
]


def ask(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    db: Annotated[Path, typer.Option(help="Database folder, made by `blockattn-rag ingest`.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Another model than the one the passages were encoded by.", callback=existing_model
        ),
    ] = None,
    mode: ModeOption = Mode.block,
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
        database = Database.open(db, model=model, device=device, dtype=dtype)
        if not database.collection.count():
            raise ValueError(f"{db} holds no passage; run `blockattn-rag ingest PATH --db {db}`")
        assistant = Assistant(database, top_k=top_k, max_new_tokens=max_new_tokens)
        answer = assistant.ask(question, mode=mode.value, on_text=None if as_json else piece)
        if not as_json:
            piece(_cut_off(answer) + "\n")
    if answer.misses:
        one = answer.misses == 1
        note(
            f"note: {count(answer.misses, 'block')} {'was' if one else 'were'} computed now; "
            "passages are stored for the next question"
        )
    emit(as_json, answer.to_dict(), "", *_sources(answer), reuse_line(answer))


def _cut_off(answer: Answer) -> str:
    """What stands behind an answer that did not come to its end."""
    if answer.finish_reason != "length":
        return ""
    return (
        f" ... [cut off after {count(answer.generated_tokens, 'token')}: --max-new-tokens, or the "
        "end of the context window]"
    )


def _sources(answer: Answer) -> list[str]:
    lines = []
    for number, source in enumerate(answer.sources, 1):
        page = f"page {source.page}" if source.page else ""
        name = " ".join(filter(None, (source.source, page, source.title)))
        score = "" if source.score is None else f" ({source.score:.2f})"
        text = " ".join(source.text.split())
        lines.append(f"[{number}] {name}{score}: {text[:100]}{'...' if len(text) > 100 else ''}")
    return lines


def reuse_line(answer: Answer) -> str:
    """What an answer reused, in one line."""
    tokens = answer.reused_tokens + answer.computed_tokens
    first = f"first token after {duration(answer.ttft_s)}"
    if answer.mode == "full":
        return f"full mode: nothing reused, {count(tokens, 'prompt token')} computed; {first}"
    return (
        f"block mode: {count(answer.hits, 'block')} reused, {answer.misses} computed; "
        f"{answer.reused_tokens:,} of {count(tokens, 'prompt token')} reused; {first}"
    )
