"""``ask`` that stays open: questions typed one after another, each behind those before it."""

from __future__ import annotations

import contextlib

from blockattn_rag.app.cli.answers import figures, show_answer, sources
from blockattn_rag.app.cli.output import emit, fail, note, piece
from blockattn_rag.app.rag.ask import Answer, Assistant
from blockattn_rag.app.rag.history import Turn
from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import BlockAttnError

_PROMPT = "> "

_HELP = """\
Type a question; it may refer to the ones before it.
  /sources  the sources of the last answer, whole
  /clear    forget the questions and answers so far
  /help     this
  /quit     leave, as Ctrl-D does
Ctrl-C stops an answer."""


def talk(assistant: Assistant, *, mode: Mode, whole: bool) -> None:
    """Answer what is typed, until the user leaves.

    Args:
        assistant: answers.
        mode: of every answer.
        whole: show sources whole.
    """
    with contextlib.suppress(ImportError):  # Windows has none; with it, lines can be edited
        import readline  # noqa: F401
    turns: list[Turn] = []
    last: Answer | None = None
    while (line := _typed()) is not None:
        match line.split():
            case []:
                continue
            case ["/quit" | "/exit"]:
                return
            case ["/help"]:
                emit(False, {}, _HELP)
            case ["/clear"]:
                turns.clear()
                last = None
                note("forgotten")
            case ["/sources"]:
                emit(False, {}, *(sources(last, whole=True) if last else ["no answer yet"]))
            case [word, *_] if word.startswith("/"):
                note(f"there is no {word}; /help tells what can be typed")
            case _:
                if (answer := _answered(assistant, line, mode, turns)) is not None:
                    emit(False, {}, "", *sources(answer, whole=whole), figures(answer))
                    last = answer


def _typed() -> str | None:
    """The next line; None if the user leaves."""
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
            note(f"that is no text in the terminal's encoding, {error.encoding}; type it again")


def _answered(assistant: Assistant, question: str, mode: Mode, turns: list[Turn]) -> Answer | None:
    """The answer, which becomes a turn; None if it was stopped or failed."""
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
