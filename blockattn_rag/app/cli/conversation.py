"""``ask`` in a terminal: questions one after another, each with the turns before it."""

from __future__ import annotations

import contextlib

from blockattn_rag.app.cli.answers import figures, show_answer, sources
from blockattn_rag.app.cli.output import emit, fail, note, piece
from blockattn_rag.app.rag.ask import Answer, Assistant, Turn
from blockattn_rag.engine.results import Mode
from blockattn_rag.errors import BlockAttnError

_PROMPT = "> "

_HELP = """\
Type a question; it may refer to earlier ones.
  /sources  show the complete sources of the last answer
  /clear    forget the conversation so far
  /help     show this help
  /quit     leave (as Ctrl-D does)
Ctrl-C stops an answer."""


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
                emit(False, {}, _HELP)
            case ["/clear"]:
                turns.clear()
                last = None
                note("conversation cleared")
            case ["/sources"]:
                emit(False, {}, *(sources(last, complete=True) if last else ["no answer yet"]))
            case [word, *_] if word.startswith("/"):
                note(f"unknown command {word}; /help lists the commands")
            case _:
                if (answer := _answer(assistant, line, mode, turns)) is not None:
                    emit(False, {}, "", *sources(answer), figures(answer))
                    last = answer


def _read_line() -> str | None:
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
            note(f"the line is not valid {error.encoding}, the terminal's encoding; type it again")


def _answer(assistant: Assistant, question: str, mode: Mode, turns: list[Turn]) -> Answer | None:
    """Answer, and add the turn. None if the answer was stopped or failed."""
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
