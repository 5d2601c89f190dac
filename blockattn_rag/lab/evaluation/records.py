"""Rows of an evaluation, records per question, and reports that summarize records by row.

A row is full mode, block mode with a recipe, or prompts without passages. Records are stored in a
file, so that interrupted runs can be resumed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import Field, asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from blockattn_rag.engine import BlockAttentionEngine, Recipe
from blockattn_rag.engine.find_recipe import RecipeLike, resolve_recipe
from blockattn_rag.errors import DataError
from blockattn_rag.lab.evaluation.datasets import Sample

FULL, CLOSED_BOOK, PLAIN = "full", "closed-book", "none"
"""Row names of full mode, prompts without passages, and plain block mode."""

Recipes = Mapping[str, RecipeLike] | Sequence[RecipeLike]
"""Recipes by row name, or a list of recipes, whose row names are their texts."""


@dataclass(frozen=True, slots=True)
class Row:
    """Combination of mode and recipe in an evaluation."""

    name: str
    recipe: Recipe | None = None

    @property
    def digest(self) -> str:
        """Digest of the recipe. Empty in full mode."""
        return "" if self.recipe is None else self.recipe.digest

    @property
    def options(self) -> dict[str, Any]:
        if self.recipe is None:
            return {"mode": "full"}
        return {"mode": "block", "recipe": self.recipe}


def rows_of(
    engine: BlockAttentionEngine, first: Row, recipes: Recipes, closed_book: bool = False
) -> list[Row]:
    """Create the rows of an evaluation: ``first``, one row per recipe, and, with ``closed_book``, a
    row without passages."""
    named = recipes if isinstance(recipes, Mapping) else {}
    pairs = [*named.items()] or [(str(recipe), recipe) for recipe in recipes]
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names) or not {FULL, CLOSED_BOOK}.isdisjoint(names):
        raise ValueError(
            f"Invalid recipe names {names}: expected distinct names other than {FULL!r} and "
            f"{CLOSED_BOOK!r}, which are reserved"
        )
    rows = [Row(name, resolve_recipe(recipe, engine.model, engine.store)) for name, recipe in pairs]
    return [first, *rows, *([Row(CLOSED_BOOK)] if closed_book else [])]


def settings_of(
    engine: BlockAttentionEngine, given: Mapping[str, Any] | None, **own: Any
) -> dict[str, Any]:
    """Join all settings that an evaluation's records depend on."""
    used = {"fingerprint": engine.model.fingerprint, "kv_dtype": engine.kv_dtype}
    return {**(given or {}), **used, **own}


class Record(Sample, Protocol):
    """Dataclass with the result of one sample in one row."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def mode(self) -> str: ...

    @property
    def recipe(self) -> str:
        """Digest of the row's recipe. Empty in full mode."""


class RowResult(Protocol):
    @property
    def mode(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


R = TypeVar("R", bound=Record)
F = TypeVar("F", bound=RowResult)


@dataclass(frozen=True)  # Generic classes cannot have slots.
class Report(Generic[R, F]):
    """Result of a run: settings, all records, and the summaries of the rows, in order."""

    settings: Mapping[str, Any]
    records: Sequence[R]
    results: Sequence[F]

    def __getitem__(self, row: str) -> F:
        return next(result for result in self.results if result.mode == row)

    def to_dict(self) -> dict[str, Any]:
        rows = [result.to_dict() for result in self.results]
        return {"settings": dict(self.settings), "rows": rows}


class RecordFile(Generic[R]):
    """JSON Lines file with a run's settings on the first line, and one record on each other line.

    An incomplete last line, left by a crash, is removed when the file is opened again. Files with
    other contents raise ``DataError``. Without a ``path``, records are only kept in memory.
    """

    def __init__(
        self,
        path: str | Path | None,
        settings: Mapping[str, Any],
        parse: Callable[[Mapping[str, Any]], R],
        samples: Sequence[Sample] = (),
        rows: Sequence[Row] = (),
    ) -> None:
        self.records: dict[tuple[str, str], R] = {}
        self._settings, self._samples, self._rows = settings, samples, rows
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._open(self._path, {"settings": dict(settings)}, parse)
            self._check(self._path)

    def append(self, records: Iterable[R]) -> None:
        new = list(records)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(_dump(asdict(record)) for record in new)
        self.records.update({(record.id, record.mode): record for record in new})

    def report(self, summarize: Callable[[str, Mapping[str, Sequence[R]]], F]) -> Report[R, F]:
        """Create the report of a run in which every sample has a record in every row."""
        found = {
            row.name: [self.records[sample.id, row.name] for sample in self._samples]
            for row in self._rows
        }
        records = [record for of_row in found.values() for record in of_row]
        return Report(self._settings, records, [summarize(name, found) for name in found])

    def _open(
        self, path: Path, header: dict[str, Any], parse: Callable[[Mapping[str, Any]], R]
    ) -> None:
        start = _dump(header).encode()
        data = path.read_bytes() if path.exists() else b""
        if len(data) < len(start) and start.startswith(data):
            # The file is new, or was cut off within the header.
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(start)
            return
        whole = data[: data.rfind(b"\n") + 1]
        first, *lines = whole.splitlines() or [data]
        try:
            found = json.loads(first)
            if not isinstance(found, dict) or found.keys() != header.keys():
                raise ValueError("no settings on this line")
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}, line 1: not a record file ({error}); choose another file"
            ) from error
        if found != json.loads(start):
            raise DataError(
                f"{path} contains records with other settings. Found: {_dump(found).strip()}, "
                f"expected: {_dump(header).strip()}. Choose another file or delete this one."
            )
        for number, line in enumerate(lines, 2):
            try:
                record = parse(json.loads(line))
            except (ValueError, RecursionError, TypeError, KeyError) as error:
                raise DataError(
                    f"{path}, line {number}: not a record ({error}); choose another file"
                ) from error
            self.records[record.id, record.mode] = record
        if len(whole) < len(data):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def _check(self, path: Path) -> None:
        """Check that the records belong to the samples, and to the recipes of the rows."""
        digests = {sample.id: sample.digest for sample in self._samples}
        recipes = {row.name: row.digest for row in self._rows}
        found = self.records.values()
        if changed := {r.id: None for r in found if digests.get(r.id, r.digest) != r.digest}:
            raise DataError(
                f"{path} contains records of other questions or passages under "
                f"{listed(list(changed))}. Choose another file or delete this one."
            )
        for record in found:
            if record.recipe != recipes.get(record.mode, record.recipe):
                raise DataError(
                    f"{path} contains records of {record.mode!r} with another recipe. Choose "
                    "another file or delete this one."
                )


def listed(ids: Sequence[str]) -> str:
    """Format a list of ids for a message, with at most 20 ids."""
    rest = f" and {len(ids) - 20} more" if len(ids) > 20 else ""
    return f"the ids {', '.join(ids[:20])}{rest}"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
