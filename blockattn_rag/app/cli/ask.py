"""``blockattn-rag ask``: one question, questions from a pipe, or a conversation."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from blockattn_rag.app.cli.answers import figures, show_answer, show_comparison, sources
from blockattn_rag.app.cli.options import DatabaseOption, RecipeOption
from blockattn_rag.app.cli.output import emit, fail, json_file, note, piece, show
from blockattn_rag.app.cli.progress import waiting
from blockattn_rag.app.rag.ask import TOP_K, Answer, Assistant, Turn
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.names import existing_model
from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import BlockAttnError

_VARIABLES = "'{\"enable_thinking\": false}'"
_SCHEMA = '{"type": "object", "properties": {"metres": {"type": "integer"}}}'
_PROMPT = "> "

_HELP = """\
Type a question. It may refer to earlier questions.
  /sources  show the complete sources of the last answer
  /clear    forget the conversation so far
  /help     show this help
  /quit     leave (same as Ctrl-D)
Ctrl-C stops an answer."""


def ask(
    question: Annotated[
        str | None,
        typer.Argument(
            help="The question. Default: start a conversation, or in a pipe, read one question per "
            "line of standard input.",
            show_default=False,
        ),
    ] = None,
    *,
    db: DatabaseOption,
    model: Annotated[
        str | None,
        typer.Option(
            help="Answer with this model instead of the one that encoded the passages.",
            callback=existing_model,
        ),
    ] = None,
    mode: Annotated[
        Mode, typer.Option(help="block reuses stored passages; full computes everything.")
    ] = "block",
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer in both modes and compare their times.")
    ] = False,
    recipe: RecipeOption = None,
    top_k: Annotated[int, typer.Option(min=1, max=200, help="Passages to retrieve.")] = TOP_K,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Maximum length of an answer in tokens.")
    ] = 256,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help=f"Variables of the model's chat template, as a JSON object such as {_VARIABLES}.",
            metavar="JSON",
        ),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(
            help="JSON schema that answers must match.",
            metavar="FILE.json",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None,
) -> None:
    """Answer questions from the ingested passages, with sources and reuse statistics.

    A conversation keeps the model loaded, and later questions may refer to earlier ones. Ctrl-C
    stops an answer, Ctrl-D leaves, /help lists the commands.
    """
    is_conversation = _is_conversation(question)
    if question is not None and not question.strip():
        raise typer.BadParameter("the question is empty", param_hint="QUESTION")
    if compare and mode != "block":
        raise typer.BadParameter("--compare answers in both modes; leave out --mode")
    if compare and is_conversation:
        raise typer.BadParameter("--compare needs a QUESTION", param_hint="QUESTION")
    variables = {}
    if chat_template_kwargs is not None:
        variables = _object(chat_template_kwargs, "--chat-template-kwargs", _VARIABLES)
    answer_schema = None
    if schema is not None:
        answer_schema = _object(schema.read_bytes(), "--schema", _SCHEMA)
    with waiting("loading the model"):
        database = Database.open(db, model=model, recipe=recipe, remembers=not compare)
        if not database.collection.count():
            raise ValueError(
                f"{db} contains no passages; run `blockattn-rag ingest PATH --db {db}`"
            )
        assistant = Assistant(
            database,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            chat_template_kwargs=variables,
            schema=answer_schema,
        )
    if is_conversation:
        note("/help lists the commands, Ctrl-D leaves")
        talk(assistant, mode=mode)
        return
    given = (line.strip() for line in sys.stdin) if question is None else [question]
    questions = filter(None, given)
    if compare:
        with waiting("warming up both modes"):
            assistant.warm_up()
        for one in questions:
            show_comparison(assistant, one)
    else:
        _answer(assistant, questions, mode)


def _object(text: str | bytes, option: str, example: str) -> dict[str, Any]:
    """Parse an option as a JSON object.

    Raises:
        BadParameter: The value is not a JSON object.
    """
    try:
        found = json.loads(text)
    except ValueError as error:  # includes UnicodeDecodeError
        raise typer.BadParameter(f"invalid JSON: {error}", param_hint=option) from error
    if not isinstance(found, dict):
        message = f"found {json.dumps(found)[:100]}, expected an object such as {example}"
        raise typer.BadParameter(message, param_hint=option)
    return found


def _is_conversation(question: str | None) -> bool:
    return question is None and sys.stdin.isatty() and sys.stdout.isatty() and not json_file()


def _answer(assistant: Assistant, questions: Iterable[str], mode: Mode) -> None:
    for question in questions:
        answer = show_answer(assistant, question, mode=mode)
        emit(answer.to_dict(), "", *sources(answer), figures(answer))


def talk(assistant: Assistant, *, mode: Mode) -> None:
    """Answer questions until the user leaves."""
    with contextlib.suppress(ImportError):  # missing on Windows; makes lines editable
        import readline  # noqa: F401
    turns: list[Turn] = []
    last: Answer | None = None
    while (line := _read_line()) is not None:
        match line.split():
            case []:
                continue
            case ["/quit" | "/exit"]:
                return
            case ["/help"]:
                show(_HELP)
            case ["/clear"]:
                turns.clear()
                last = None
                note("conversation cleared")
            case ["/sources"]:
                show(*(sources(last, complete=True) if last else ["no answer yet"]))
            case [word, *_] if word.startswith("/"):
                note(f"unknown command {word}; /help lists the commands")
            case _:
                if (answer := _reply(assistant, line, mode, turns)) is not None:
                    show("", *sources(answer), figures(answer))
                    last = answer


def _read_line() -> str | None:
    """Read the next line. None: the user leaves."""
    while True:
        try:
            return input(_PROMPT).strip()
        except EOFError:
            piece("\n")
            return None
        except KeyboardInterrupt:
            piece("\n")
            note("Ctrl-D leaves")
        except UnicodeDecodeError as error:
            note(f"the line is not valid {error.encoding}, the terminal's encoding; type it again")


def _reply(assistant: Assistant, question: str, mode: Mode, turns: list[Turn]) -> Answer | None:
    """Answer a question and add the turn. None: the answer was stopped or failed."""
    try:
        answer = show_answer(assistant, question, mode=mode, history=turns)
    except KeyboardInterrupt:
        piece(" ... [stopped]\n")
        return None
    except (BlockAttnError, ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
        return None
    turns.append(Turn(question, answer.answer))
    return answer
