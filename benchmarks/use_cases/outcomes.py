"""Outcomes of the use cases, with their table and counts."""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.exceptions import OutputParserException
from registry import Use

from blockattn_rag.errors import IncompleteAnswerError, ToolCallError

UNREAD = (OutputParserException, IncompleteAnswerError, ToolCallError)
"""Errors caused by the model's answer: it does not follow the format, or is truncated."""
UNREAD_BY_FORMAT = (ValueError, IndexError, KeyError)
"""Names of other errors that the frameworks' parsers raise for these answers."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a use case. ``result`` is "works", "unread", "fails" or "not installed".

    ``error`` is the name of the error. ``prompt_tokens`` is the number of tokens in all prompts of
    the use case, and ``reused_tokens`` the number of those from stored blocks.
    """

    result: str
    error: str | None = None
    prompt_tokens: int = 0
    reused_tokens: int = 0

    def __str__(self) -> str:
        if self.result == "unread":
            return "needs a more capable model"
        if self.error:
            return f"{self.result}: {self.error}"
        if not self.reused_tokens:
            return self.result
        return f"works with reuse ({100 * self.reused_tokens / self.prompt_tokens:.0f} %)"


@dataclass(frozen=True)
class Row:
    """A use case, and its outcomes with this package's models and the framework's own models."""

    framework: str
    use: str
    ours: Outcome
    peer: Outcome


def tried(use: Use, kit: Any, *, trace: bool = False) -> Outcome:
    """Run a use case with a kit, which is None if it is not installed.

    ``trace`` prints tracebacks of failures.
    """
    if kit is None:
        return Outcome("not installed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kit.prepare()
            if use.run(kit):
                return Outcome("works")
            error: Exception | None = None
    except Exception as raised:  # noqa: BLE001 - any error is an outcome
        error = raised
        if trace:
            traceback.print_exception(error)
    name = type(error).__name__ if error else "not as promised"
    unread = isinstance(error, (*UNREAD, *UNREAD_BY_FORMAT) if use.by_format else UNREAD)
    return Outcome("unread" if unread or (use.by_format and not error) else "fails", name)


def table(rows: Sequence[Row]) -> str:
    """Format the outcomes as a Markdown table."""
    head = ["| | use | blockattn_rag | the framework's own local model |", "|---|---|---|---|"]
    return "\n".join(
        [*head, *(f"| {row.framework} | {row.use} | {row.ours} | {row.peer} |" for row in rows)]
    )


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Count use cases by result. ``only_peer`` lists those that work only with a peer."""
    only_peer = [r.use for r in rows if r.peer.result == "works" and r.ours.result != "works"]
    return {
        "uses": len(rows),
        "ours": dict(Counter(row.ours.result for row in rows)),
        "ours_with_reuse": sum(row.ours.reused_tokens > 0 for row in rows),
        "peer": dict(Counter(row.peer.result for row in rows)),
        "only_peer": only_peer,
    }


def summary(rows: Sequence[Row]) -> str:
    """Return the counts as text."""
    found = counts(rows)

    def listed(results: dict[str, int]) -> str:
        names = (("works", "work"), ("unread", "need a more capable model"), ("fails", "fail"))
        return ", ".join(f"{results.get(result, 0)} {name}" for result, name in names)

    return (
        f"{found['uses']} uses. With this package's models, {listed(found['ours'])}; "
        f"{found['ours_with_reuse']} reuse blocks. "
        f"With the frameworks' own, {listed(found['peer'])}. "
        f"Uses that work only with the latter: {', '.join(found['only_peer']) or 'none'}."
    )
