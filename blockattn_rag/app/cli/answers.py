"""Answers in a terminal: streamed text, sources, reuse statistics, and comparison of both modes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from rich.console import RenderableType

from blockattn_rag.app.cli.output import count, duration, emit, json_file, note, piece, table
from blockattn_rag.app.cli.progress import spinner
from blockattn_rag.app.rag.ask import Answer, Assistant, Turn
from blockattn_rag.engine.results import Mode

_SHOWN_CHARACTERS = 100


def show_answer(
    assistant: Assistant,
    question: str,
    *,
    mode: Mode,
    history: Sequence[Turn] = (),
) -> Answer:
    """Ask a question and stream the answer to stdout, unless the output is JSON."""
    quiet = json_file() is not None
    with ExitStack() as until_text:
        until_text.enter_context(spinner("answering"))

        def show(text: str) -> None:
            until_text.close()
            piece(text)

        on_text = None if quiet else show
        answer = assistant.ask(question, mode=mode, on_text=on_text, history=history)
    if not quiet:
        piece(_ending(answer) + "\n")
    if misses := answer.stats.misses:
        note(
            f"note: {count(misses, 'block')} {'was' if misses == 1 else 'were'} computed now; "
            "passages are stored for the next question"
        )
    return answer


def _ending(answer: Answer) -> str:
    """The reason why an answer is incomplete. Empty for complete answers."""
    if answer.finish_reason == "stop":
        return ""
    if answer.finish_reason == "repetition":
        return " ... [stopped: the answer repeats itself; try fewer passages, such as --top-k 2]"
    if answer.finish_reason != "length":
        return f" ... [stopped: {answer.finish_reason}]"
    tokens = count(answer.stats.generated_tokens, "token")
    return f" ... [cut off after {tokens}: --max-new-tokens, or the end of the context window]"


def sources(answer: Answer, *, complete: bool = False) -> list[str]:
    """Format each source as one line, or with its complete text if ``complete`` is set."""
    lines = []
    for number, source in enumerate(answer.sources, 1):
        page = f"page {source.page}" if source.page else ""
        name = " ".join(filter(None, (source.source, page, source.title)))
        score = "" if source.score is None else f" ({source.score:.2f})"
        text = " ".join(source.text.split())
        if complete:
            lines.append(f"[{number}] {name}{score}\n{source.text.strip()}\n")
            continue
        more = "..." if len(text) > _SHOWN_CHARACTERS else ""
        lines.append(f"[{number}] {name}{score}: {text[:_SHOWN_CHARACTERS]}{more}")
    return lines


def figures(answer: Answer) -> str:
    """Summarize the reuse and the times of an answer in one line."""
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


def show_comparison(assistant: Assistant, question: str) -> None:
    """Answer in both modes, and print both answers and a table of their times.

    Block mode runs first, so full mode cannot warm it up: it reads the passages from the store, as
    in a new process. Full mode reuses nothing from the store or from earlier answers.
    """
    answers: list[Answer] = []
    modes: tuple[Mode, ...] = ("block", "full")
    for mode in modes:
        if not json_file():
            piece(f"{mode} mode:\n")
        answers.append(show_answer(assistant, question, mode=mode))
    block, full = answers
    data = {
        "question": question,
        "block": block.to_dict(),
        "full": full.to_dict(),
        "answers_are_equal": block.answer == full.answer,
        "first_token_ratio": full.waited_s / block.waited_s,
        "answer_ratio": full.answered_s / block.answered_s,
    }
    emit(data, "", *sources(block), "", _table(block, full), *_remarks(block, full))


def _table(block: Answer, full: Answer) -> RenderableType:
    def times(label: str, block_s: float, full_s: float) -> tuple[str, ...]:
        return label, duration(block_s), duration(full_s), f"{full_s / block_s:.1f} x"

    rows = [
        times("first token", block.waited_s, full.waited_s),
        times("whole answer", block.answered_s, full.answered_s),
        *(
            (label, f"{getattr(block.stats, name):,}", f"{getattr(full.stats, name):,}", "")
            for label, name in (
                ("prompt tokens computed", "computed_tokens"),
                ("prompt tokens reused", "reused_tokens"),
                ("answer tokens", "generated_tokens"),
            )
        ),
    ]
    title = f"Both modes, {count(block.stats.prompt_tokens, 'prompt token')}"
    return table(title, ("", "block mode", "full mode", "full / block"), rows)


def _remarks(block: Answer, full: Answer) -> list[str]:
    equal = "The answers are equal." if block.answer == full.answer else "The answers differ."
    recipe = f" Block mode's recipe: {block.stats.recipe}." if block.stats.recipe else ""
    remarks = [f"{equal}{recipe} Times include retrieval, but not loading the model."]
    if misses := block.stats.misses:
        remarks.append(
            f"Block mode had to compute {count(misses, 'block')} of the prompt; ask again to "
            "measure with every passage stored."
        )
    return remarks
