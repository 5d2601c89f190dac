"""``blockattn-rag ask``: answer a question, questions from a pipe, or a conversation."""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from blockattn_rag.app.cli.options import DatabaseOption, MaxNewTokensOption, RecipeOption
from blockattn_rag.app.cli.output import (
    count,
    duration,
    emit,
    fail,
    json_file,
    note,
    piece,
    show,
    table,
)
from blockattn_rag.app.cli.progress import spinner, waiting
from blockattn_rag.app.rag.ask import TOP_K, Assistant, AssistantAnswer, Turn
from blockattn_rag.app.rag.database import Database
from blockattn_rag.app.rag.names import existing_model
from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import BlockAttnError

_VARIABLES = "'{\"enable_thinking\": false}'"
_SCHEMA = '{"type": "object", "properties": {"metres": {"type": "integer"}}}'
_SHOWN_CHARACTERS = 100
_COLUMNS = ("", "block mode", "full mode", "full / block")
Compared = tuple[AssistantAnswer, AssistantAnswer]
"""Answers to a question in block mode and in full mode."""

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
            help="Question. Default: start a conversation or, in a pipe or with --json, read one "
            "question per line from standard input.",
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
        Mode, typer.Option(help="block reuses stored passages; full prefills the complete prompt.")
    ] = "block",
    compare: Annotated[
        bool, typer.Option("--compare", help="Answer in both modes and compare timings.")
    ] = False,
    recipe: RecipeOption = None,
    top_k: Annotated[int, typer.Option(min=1, max=200, help="Passages to retrieve.")] = TOP_K,
    max_new_tokens: MaxNewTokensOption = 256,
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

    In a conversation, the model stays loaded, and questions may refer to earlier ones. Ctrl-C stops
    an answer, Ctrl-D exits, /help lists the commands.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty() and not json_file()
    is_conversation = question is None and is_terminal
    if question is not None and not question.strip():
        raise typer.BadParameter("The question is empty", param_hint="QUESTION")
    if compare and mode != "block":
        raise typer.BadParameter("--compare answers in both modes; remove --mode")
    if compare and is_conversation:
        raise typer.BadParameter("--compare requires a QUESTION", param_hint="QUESTION")
    variables = _object(chat_template_kwargs, "--chat-template-kwargs", _VARIABLES)
    answer_schema = _object(schema.read_bytes() if schema else None, "--schema", _SCHEMA)
    with waiting("loading the model"):
        database = Database.open(db, model=model, recipe=recipe, remembers=not compare)
        database.require_passages()
        assistant = Assistant(
            database,
            top_k=top_k,
            max_new_tokens=max_new_tokens,
            chat_template_kwargs=variables,
            schema=answer_schema,
        )
    if is_conversation:
        note("/help lists the commands, Ctrl-D exits")
        talk(assistant, mode=mode)
        return
    lines = (line.strip() for line in sys.stdin) if question is None else [question]
    questions = filter(None, lines)
    if compare:
        with waiting("warming up both modes"):
            assistant.warm_up()
        compared = [show_comparison(assistant, line) for line in questions]
        if len(compared) > 1:
            show_medians(compared)
        return
    for line in questions:
        answer = show_answer(assistant, line, mode=mode)
        emit(answer.to_dict(), "", *sources(answer), reuse_figures(answer))


def _object(text: str | bytes | None, option: str, example: str) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except ValueError as error:  # Includes UnicodeDecodeError.
        raise typer.BadParameter(f"Invalid JSON: {error}", param_hint=option) from error
    if not isinstance(value, dict):
        message = f"Found {json.dumps(value)[:100]}, expected an object such as {example}"
        raise typer.BadParameter(message, param_hint=option)
    return value


def talk(assistant: Assistant, *, mode: Mode) -> None:
    with contextlib.suppress(ImportError):  # readline makes input editable. Windows lacks it.
        import readline  # noqa: F401
    turns: list[Turn] = []
    last: AssistantAnswer | None = None
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
                note("Conversation cleared")
            case ["/sources"]:
                show(*(sources(last, complete=True) if last else ["No answer yet"]))
            case [word, *_] if word.startswith("/"):
                note(f"Unknown command {word}; /help lists the commands")
            case _:
                try:
                    last = show_answer(assistant, line, mode=mode, history=turns)
                except KeyboardInterrupt:
                    piece(" ... [stopped]\n")
                except (BlockAttnError, ValueError, OSError) as error:
                    fail(" ".join(str(error).split()))
                else:
                    turns.append(Turn(line, last.answer))
                    show("", *sources(last), reuse_figures(last))


def _read_line() -> str | None:
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            piece("\n")
            return None
        except KeyboardInterrupt:
            piece("\n")
            note("Ctrl-D exits")
        except UnicodeDecodeError as error:
            note(f"The line is not valid {error.encoding} (the terminal's encoding); type it again")


def show_answer(
    assistant: Assistant, question: str, *, mode: Mode, history: Sequence[Turn] = ()
) -> AssistantAnswer:
    """Ask a question and, unless the output is JSON, stream the answer to stdout."""
    is_streamed = json_file() is None
    with contextlib.ExitStack() as until_text:
        until_text.enter_context(spinner("answering"))

        def show(text: str) -> None:
            until_text.close()
            piece(text)

        on_text = show if is_streamed else None
        answer = assistant.ask(question, mode=mode, on_text=on_text, history=history)
    if is_streamed:
        piece(_ending(answer) + "\n")
    if misses := answer.stats.misses:
        note(
            f"note: {count(misses, 'block')} {'was' if misses == 1 else 'were'} computed now; "
            "passages are stored for the next question"
        )
    return answer


def _ending(answer: AssistantAnswer) -> str:
    """Return a remark on why an answer is incomplete. Empty for a complete answer."""
    if answer.finish_reason == "stop":
        return ""
    if answer.finish_reason == "repetition":
        return " ... [stopped: the answer repeats itself; try fewer passages (--top-k 2)]"
    if answer.finish_reason != "length":
        return f" ... [stopped: {answer.finish_reason}]"
    tokens = count(answer.stats.generated_tokens, "token")
    return f" ... [cut off after {tokens}: --max-new-tokens, or the end of the context window]"


def sources(answer: AssistantAnswer, *, complete: bool = False) -> list[str]:
    """Format each source as one line or, with ``complete``, with its complete text."""
    lines = []
    for number, source in enumerate(answer.sources, 1):
        page = f"page {source.page}" if source.page else ""
        name = " ".join(filter(None, (source.source, page, source.title)))
        score = "" if source.score is None else f" ({source.score:.2f})"
        if complete:
            text = f"\n{source.text.strip()}\n"
        else:
            line = " ".join(source.text.split())
            more = "..." if len(line) > _SHOWN_CHARACTERS else ""
            text = f": {line[:_SHOWN_CHARACTERS]}{more}"
        lines.append(f"[{number}] {name}{score}{text}")
    return lines


def reuse_figures(answer: AssistantAnswer) -> str:
    """Summarize the reuse and timings of an answer in one line."""
    stats = answer.stats
    tokens = count(stats.prompt_tokens, "prompt token")
    first = (
        f"first token after {duration(answer.waited_s)}"
        f"{' (with the one-time warm-up)' if answer.includes_warm_up else ''}, "
        f"{count(stats.generated_tokens, 'token')} after {duration(answer.answered_s)}"
    )
    if stats.mode == "full":
        return f"full mode: nothing reused, {tokens} computed; {first}"
    recipe = f"; recipe {stats.recipe}" if stats.recipe else ""
    int8 = f" ({stats.int8_blocks} in int8)" if stats.int8_blocks else ""
    return (
        f"block mode: {count(stats.hits, 'block')} reused, {stats.misses} computed{int8}; "
        f"{stats.reused_tokens:,} of {tokens} reused; {first}{recipe}"
    )


def show_comparison(assistant: Assistant, question: str) -> Compared:
    """Answer in block and full mode, and print both answers and a table of their timings.

    Block mode reads the passages from the store, as in a new process, because `ask` opens the
    database with ``remembers=False``. Full mode reuses neither the store nor earlier answers.
    """
    answers = []
    for mode in get_args(Mode):
        if not json_file():
            piece(f"{mode} mode:\n")
        answers.append(show_answer(assistant, question, mode=mode))
    block, full = answers
    times, rows = _median_times([(block, full)])
    rows += [
        (label, f"{getattr(block.stats, name):,}", f"{getattr(full.stats, name):,}", "")
        for label, name in (
            ("prompt tokens computed", "computed_tokens"),
            ("prompt tokens reused", "reused_tokens"),
            ("answer tokens", "generated_tokens"),
        )
    ]
    are_equal = block.answer == full.answer
    data = {
        "question": question,
        "block": block.to_dict(),
        "full": full.to_dict(),
        "answers_are_equal": are_equal,
        "first_token_ratio": times["first_token_ratio"],
        "answer_ratio": times["answer_ratio"],
    }
    recipe = f" Block mode's recipe: {block.stats.recipe}." if block.stats.recipe else ""
    remarks = [
        f"The answers {'are equal' if are_equal else 'differ'}.{recipe} Times include retrieval, "
        "but not loading the model."
    ]
    if misses := block.stats.misses:
        remarks.append(
            f"Block mode had to encode {count(misses, 'block')} of the prompt; ask again to "
            "measure with all passages stored."
        )
    title = f"Both modes, {count(block.stats.prompt_tokens, 'prompt token')}"
    emit(data, "", *sources(block), "", table(title, _COLUMNS, rows), *remarks)
    return block, full


def show_medians(compared: Sequence[Compared]) -> None:
    """Print the median timings of several questions in both modes, and their ratios."""
    times, rows = _median_times(compared)
    equal = sum(block.answer == full.answer for block, full in compared)
    data = {"questions": len(compared), "equal_answers": equal, **times}
    shown = count(len(compared), "question")
    emit(
        {"medians": data},
        "",
        table(f"Medians of {shown}", _COLUMNS, rows),
        f"The answers to {equal:,} of {shown} are equal.",
    )


def _median_times(compared: Sequence[Compared]) -> tuple[dict[str, Any], list[tuple[str, ...]]]:
    """Return the median timings in both modes, as JSON and as rows of a table."""
    data, rows = dict[str, Any](), list[tuple[str, ...]]()
    for label, name, ratio in (
        ("first token", "waited_s", "first_token_ratio"),
        ("whole answer", "answered_s", "answer_ratio"),
    ):
        block_s, full_s = (
            statistics.median(getattr(answer, name) for answer in answers)
            for answers in zip(*compared, strict=True)
        )
        data |= {name: {"block": block_s, "full": full_s}, ratio: full_s / block_s}
        rows.append((label, duration(block_s), duration(full_s), f"{full_s / block_s:.1f} x"))
    return data, rows
