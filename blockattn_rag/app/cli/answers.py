"""Answers as the command line shows them: text as it comes, sources, and what was reused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from blockattn_rag.app.cli.figures import count, duration
from blockattn_rag.app.cli.output import note, piece, spinner
from blockattn_rag.app.rag.ask import Answer, Assistant
from blockattn_rag.app.rag.history import Turn
from blockattn_rag.engine.results import Mode

_SHOWN_CHARACTERS = 100


def show_answer(
    assistant: Assistant,
    question: str,
    *,
    mode: Mode,
    history: Sequence[Turn] = (),
    quiet: bool = False,
) -> Answer:
    """Ask, and show the answer as it comes, unless ``quiet``; a terminal shows the waiting."""
    with ExitStack() as until_text:
        until_text.enter_context(spinner("answering"))

        def show(text: str) -> None:
            until_text.close()
            piece(text)

        on_text = None if quiet else show
        answer = assistant.ask(question, mode=mode, on_text=on_text, history=history)
    if not quiet:
        piece(_cut_off(answer) + "\n")
    if misses := answer.stats.misses:
        note(
            f"note: {count(misses, 'block')} {'was' if misses == 1 else 'were'} computed now; "
            "passages are stored for the next question"
        )
    return answer


def _cut_off(answer: Answer) -> str:
    """What stands behind an answer that did not come to its end."""
    if answer.finish_reason == "stop":
        return ""
    if answer.finish_reason == "repetition":
        return " ... [ended: the answer repeated itself; fewer passages may help: --top-k 2]"
    if answer.finish_reason != "length":
        return f" ... [ended: {answer.finish_reason}]"
    tokens = count(answer.stats.generated_tokens, "token")
    return f" ... [cut off after {tokens}: --max-new-tokens, or the end of the context window]"


def sources(answer: Answer, *, whole: bool = False) -> list[str]:
    """A line for each source, with its page if it has one; ``whole``: and its whole text."""
    lines = []
    for number, source in enumerate(answer.sources, 1):
        page = f"page {source.page}" if source.page else ""
        name = " ".join(filter(None, (source.source, page, source.title)))
        score = "" if source.score is None else f" ({source.score:.2f})"
        text = " ".join(source.text.split())
        if whole:
            lines.append(f"[{number}] {name}{score}\n{source.text.strip()}\n")
            continue
        more = "..." if len(text) > _SHOWN_CHARACTERS else ""
        lines.append(f"[{number}] {name}{score}: {text[:_SHOWN_CHARACTERS]}{more}")
    return lines


def figures(answer: Answer) -> str:
    """What an answer reused and took, in one line."""
    stats = answer.stats
    tokens = count(stats.prompt_tokens, "prompt token")
    first = (
        f"first token after {duration(answer.waited_s)}, "
        f"{count(stats.generated_tokens, 'token')} after {duration(answer.answered_s)}"
    )
    if stats.mode == "full":
        return f"full mode: nothing reused, {tokens} computed; {first}"
    recipe = f"; recipe {stats.recipe}" if stats.recipe else ""
    promoted = f", {stats.promoted_tokens:,} promoted" if stats.promoted_tokens else ""
    int8 = f" ({stats.int8_blocks} in int8)" if stats.int8_blocks else ""
    return (
        f"block mode: {count(stats.hits, 'block')} reused, {stats.misses} computed{int8}; "
        f"{stats.reused_tokens:,} of {tokens} reused{promoted}; {first}{recipe}"
    )
