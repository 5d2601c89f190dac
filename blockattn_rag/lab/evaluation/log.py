"""Replays logged prompts in full mode and in block mode, and compares them.

One JSON object a line, plain or gzip; ``prompt`` is a list as for ``engine.generate``: the context
blocks, and the final block last::

    {"prompt": ["You are ...", "passage 1", "passage 2", "question"], "id": "optional"}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockattn_rag.engine.engine import BlockAttentionEngine
from blockattn_rag.errors import DataError
from blockattn_rag.files import list_of, not_blank, numbered_lines, of_kind, parse_line
from blockattn_rag.lab.evaluation.fidelity import (
    FLOOR,
    FidelityReport,
    compare_each,
    compare_prompt,
)
from blockattn_rag.lab.evaluation.rows import Recipes, recipe_rows
from blockattn_rag.prompts.blocks import BlockPrompt


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """A prompt of a log: its id, and its blocks with the final block last."""

    id: str
    texts: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Hash of the texts; the same in every process."""
        return hashlib.sha256(json.dumps(self.texts).encode()).hexdigest()[:16]


def read_log(path: str | Path, *, limit: int | None = None) -> list[LoggedPrompt]:
    """Read logged prompts from a ``.jsonl`` or ``.jsonl.gz`` file.

    Args:
        path: The file. Blank lines are skipped.
        limit: Most prompts to read. Default: all.

    Raises:
        DataError: A line is malformed or an id comes twice (the message names file and line), or
            the file is missing, damaged or empty.
    """
    found: dict[str, LoggedPrompt] = {}
    for number, line in numbered_lines(Path(path)):
        if limit is not None and len(found) >= limit:
            break
        try:
            logged = _logged(parse_line(line), str(number))
        except DataError as error:
            raise DataError(f"{path}, line {number}: {error}") from error
        if logged.id in found:
            raise DataError(f"{path}, line {number}: the id {logged.id!r} was used before")
        found[logged.id] = logged
    if not found:
        raise DataError(f"{path}: expected one JSON object a line, found no line")
    return list(found.values())


def _logged(value: object, default_id: str) -> LoggedPrompt:
    record = of_kind(value, dict, "a record")
    texts = [
        not_blank(text, f"'prompt[{index}]'")
        for index, text in enumerate(list_of(record, "prompt"))
    ]
    name = record.get("id", default_id)
    return LoggedPrompt(str(name if isinstance(name, int) else of_kind(name, str, "'id'")),
                        tuple(texts))  # fmt: skip


def replay(
    engine: BlockAttentionEngine,
    log: Sequence[LoggedPrompt],
    recipes: Recipes = ("auto",),
    *,
    max_new_tokens: int = 24,
    records_path: str | Path | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> FidelityReport:
    """Compare block mode with full mode on logged prompts.

    Args:
        engine: The model and its KV store.
        log: See ``read_log``.
        recipes: Recipes of block mode to compare; see ``evaluation.rows``.
        max_new_tokens: Longest answer of full mode. Default: 24.
        records_path: File of records, one JSON line for each prompt and recipe. What it holds is
            not compared again.
        on_progress: Called with prompts done and all prompts.

    Raises:
        ValueError: No prompt, or a recipe cannot be used.
        DataError: ``records_path`` holds records of another measurement.
        ContextOverflowError: A prompt does not fit in the context window.
    """
    if not log:
        raise ValueError("Found no prompt to replay, expected at least one.")
    rows = [FLOOR, *recipe_rows(engine, recipes)]
    noted = {
        "measured": "log",
        "fingerprint": engine.model.fingerprint,
        "kv_dtype": engine.kv_dtype,
        "max_new_tokens": max_new_tokens,
    }
    return compare_each(
        log,
        rows,
        lambda logged, missing: compare_prompt(
            engine, logged, missing, BlockPrompt.from_texts(logged.texts), max_new_tokens
        ),
        noted,
        records_path,
        on_progress,
    )
