"""``blockattn-rag ask``: a question to a database, or several."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from blockattn_rag.app.cli import conversation
from blockattn_rag.app.cli.answers import figures, show_answer, sources
from blockattn_rag.app.cli.compare import show_comparison
from blockattn_rag.app.cli.output import (
    JsonOption,
    RecipeOption,
    ServerOption,
    emit,
    note,
    waiting,
    working,
)
from blockattn_rag.app.rag.ask import TOP_K, Assistant
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.model_names import existing_model
from blockattn_rag.engine.results import Mode

ModeOption = Annotated[
    Mode, typer.Option(help="block reuses stored passages; full computes everything.")
]


def _object(text: str | bytes, name: str, option: str, example: str) -> dict[str, Any]:
    """The JSON object that an option is, or names the file of."""
    try:
        found = json.loads(text)
    except ValueError as error:  # also where bytes are no text
        raise typer.BadParameter(f"{name} is no JSON: {error}", param_hint=option) from error
    if not isinstance(found, dict):
        message = f"expected an object, such as {example}, found {json.dumps(found)[:100]}"
        raise typer.BadParameter(message, param_hint=option)
    return found


def _variables(text: str | None) -> dict[str, Any]:
    """``--chat-template-kwargs``."""
    return {} if text is None else _object(text, "it", "--chat-template-kwargs", _VARIABLES)


def _schema(file: Path | None) -> dict[str, Any] | None:
    """``--schema``."""
    return None if file is None else _object(file.read_bytes(), str(file), "--schema", _SCHEMA)


_VARIABLES = "'{\"enable_thinking\": false}'"
_SCHEMA = '{"type": "object", "properties": {"metres": {"type": "integer"}}}'


def ask(
    question: Annotated[
        str | None,
        typer.Argument(
            help="What to ask. Without it, a conversation; if standard input is no terminal, its "
            "lines, each a question of its own.",
            show_default=False,
        ),
    ] = None,
    *,
    db: Annotated[Path, typer.Option(help="Database folder, made by `blockattn-rag ingest`.")],
    model: Annotated[
        str | None,
        typer.Option(
            help="Another model than the one the passages were encoded by.", callback=existing_model
        ),
    ] = None,
    server: ServerOption = None,
    mode: ModeOption = "block",
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Answer in both modes and show their times side by side."),
    ] = False,
    recipe: RecipeOption = None,
    top_k: Annotated[int, typer.Option(min=1, max=200, help="Passages to retrieve.")] = TOP_K,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help=f"Variables of the model's chat template, a JSON object such as {_VARIABLES}.",
            metavar="JSON",
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="File of a JSON schema: the answer is JSON that fits it, whole or an error.",
            metavar="FILE.json",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None,
    page: Annotated[
        bool, typer.Option("--page", help="Show each source whole, and not its beginning alone.")
    ] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Answer a question from the ingested passages; then the sources, and what was reused.

    Without a question it stays open, keeps the model loaded, and later questions may refer to
    earlier ones: Ctrl-C stops an answer, Ctrl-D leaves, /help tells more.
    """
    with working(as_json):
        if question is not None and not question.strip():
            raise typer.BadParameter("the question is empty", param_hint="QUESTION")
        if compare and mode != "block":
            raise typer.BadParameter("--compare answers in both modes; leave out --mode")
        if compare and _is_conversation(question, as_json):
            raise typer.BadParameter("--compare needs a QUESTION", param_hint="QUESTION")
        variables, held_to = _variables(chat_template_kwargs), _schema(schema)
        with waiting("loading the model"):
            database = Database.open(
                db, model=model, server=server, recipe=recipe, device=device, dtype=dtype,
                remembers=not compare,
            )  # fmt: skip
            if not database.collection.count():
                raise ValueError(
                    f"{db} holds no passage; run `blockattn-rag ingest PATH --db {db}`"
                )
            assistant = Assistant(
                database,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
                chat_template_kwargs=variables,
                schema=held_to,
            )
    if _is_conversation(question, as_json):
        note("/help lists what can be typed, Ctrl-D leaves")
        conversation.talk(assistant, mode=mode, whole=page)
        return
    given = (line.strip() for line in sys.stdin) if question is None else [question]
    asked = filter(None, given)
    if compare:
        with working(as_json), waiting("warming up both modes"):
            assistant.warm_up()
        for one in asked:
            show_comparison(assistant, one, as_json=as_json, whole=page)
    else:
        _answer(assistant, asked, mode, as_json=as_json, whole=page)


def _is_conversation(question: str | None, as_json: bool) -> bool:
    return question is None and sys.stdin.isatty() and sys.stdout.isatty() and not as_json


def _answer(
    assistant: Assistant, questions: Iterable[str], mode: Mode, *, as_json: bool, whole: bool
) -> None:
    """Answer questions, each on its own, with sources and figures."""
    for question in questions:
        with working(as_json):
            answer = show_answer(assistant, question, mode=mode, quiet=as_json)
        emit(as_json, answer.to_dict(), "", *sources(answer, whole=whole), figures(answer))
