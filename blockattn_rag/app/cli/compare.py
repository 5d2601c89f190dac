"""``ask --compare``: the answers of both modes, and a table of what they took."""

from __future__ import annotations

from rich.console import RenderableType

from blockattn_rag.app.cli.answers import show_answer, sources
from blockattn_rag.app.cli.figures import count, duration
from blockattn_rag.app.cli.output import emit, piece, table, working
from blockattn_rag.app.rag.ask import Answer, Assistant
from blockattn_rag.app.rag.comparison import Comparison, compare
from blockattn_rag.engine.results import Mode


def show_comparison(
    assistant: Assistant, question: str, *, as_json: bool = False, whole: bool = False
) -> None:
    """Answer a question in both modes, and print both answers and the table."""

    def answer(mode: Mode) -> Answer:
        if not as_json:
            piece(f"{mode} mode:\n")
        return show_answer(assistant, question, mode=mode, quiet=as_json)

    with working(as_json):
        found = compare(answer)
    emit(
        as_json,
        found.to_dict(),
        "",
        *sources(found.block, whole=whole),
        "",
        _table(found),
        *_remarks(found),
    )


def _table(found: Comparison) -> RenderableType:
    block, full = found.block, found.full
    rows = [
        ("first token", *_times(block.waited_s, full.waited_s, found.first_token_ratio)),
        ("whole answer", *_times(block.answered_s, full.answered_s, found.answer_ratio)),
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


def _times(block_s: float, full_s: float, ratio: float) -> tuple[str, str, str]:
    return duration(block_s), duration(full_s), f"{ratio:.1f} x"


def _remarks(found: Comparison) -> list[str]:
    equal = "The answers are equal." if found.answers_are_equal else "The answers differ."
    recipe = (
        f" Block mode's recipe: {found.block.stats.recipe}." if found.block.stats.recipe else ""
    )
    remarks = [f"{equal}{recipe} Times include retrieval; loading the model is not counted."]
    if misses := found.block.stats.misses:
        remarks.append(
            f"{count(misses, 'block')} of the prompt had to be computed in block mode: ask again "
            "for the time with every passage stored."
        )
    return remarks
