"""Per-question records of an evaluation, kept in a file so that a stopped run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.errors import DataError

_COUNTS = ("hits", "misses", "reused_tokens", "computed_tokens", "generated_tokens")


class OtherSettingsError(DataError):
    """A file holds records of a run with other settings."""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """One question answered in one row of an evaluation. Scores lie in 0..1; times are seconds.

    ``digest`` is the sample's (question, answers, passages as they were shown), ``mode`` the name
    of the row, ``recipe`` the digest of its recipe (empty in full mode). ``finish_reason`` is
    ``"length"`` where the answer was cut off by its limit or by the context window. Of ``stats``,
    the counts are kept, and ``ttft_s``, which is that of the question's batch; the others are 0.
    """

    id: str
    digest: str
    mode: str
    kind: str
    question: str
    answers: tuple[str, ...]
    output: str
    accuracy: float
    exact_match: float
    f1: float
    stats: ReuseStats
    finish_reason: str
    recipe: str = ""

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> EvaluationRecord:
        """The record whose ``to_dict`` this is.

        Raises:
            KeyError, TypeError: fields are missing, or there are others.
        """
        rest = {**line, "answers": tuple(line["answers"])}
        figures = {name: rest.pop(name) for name in (*_COUNTS, "ttft_s")}
        mode: Mode = "block" if line.get("recipe") else "full"
        return cls(**rest, stats=ReuseStats(mode, **figures))

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types, the figures beside the other fields; times in seconds."""
        line = without_blank(asdict(self), "recipe")
        stats, reason = line.pop("stats"), line.pop("finish_reason")
        counts = {name: stats[name] for name in _COUNTS}
        return {**line, **counts, "finish_reason": reason, "ttft_s": stats["ttft_s"]}


class Sample(Protocol):
    """What is asked: its name within a run, and the hash of all that its records depend on."""

    @property
    def id(self) -> str: ...
    @property
    def digest(self) -> str: ...


class Record(Sample, Protocol):
    """One sample in one row, as a record file holds it."""

    @property
    def mode(self) -> str: ...
    @property
    def recipe(self) -> str:
        """Digest of the row's recipe; empty in full mode."""

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""


R = TypeVar("R", bound=Record)


class RecordFile(Generic[R]):
    """A JSONL file: the run's settings on the first line, then one record a line.

    A last line that was cut off by a crash is dropped when the file is opened again. A file that
    this class did not write is never changed.

    Args:
        path: the file; made with its folders if it does not exist.
        settings: what the records depend on (model, data, prompt format, ...).
        parse: makes a record of its ``to_dict``; raises TypeError or KeyError.

    Raises:
        DataError: the file was written under other settings, or is no record file.
    """

    def __init__(
        self,
        path: str | Path,
        settings: Mapping[str, Any],
        parse: Callable[[Mapping[str, Any]], R],
    ) -> None:
        self.path = Path(path)
        self.records: dict[tuple[str, str], R] = {}
        header = {"settings": dict(settings)}
        start = _dump(header).encode()
        data = self.path.read_bytes() if self.path.exists() else b""
        if len(data) < len(start) and start.startswith(data):  # new, or cut off within the header
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(start)
            return
        whole = data[: data.rfind(b"\n") + 1]
        first, *lines = whole.splitlines() or [data]
        self._check_header(self._parse(1, first), header)
        for number, line in enumerate(lines, 2):
            fields = self._parse(number, line)
            try:
                record = parse(fields)
            except (TypeError, KeyError) as error:
                raise self._refusal(number, f"not a record ({error})") from error
            self.records[record.id, record.mode] = record
        if len(whole) < len(data):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))

    def check_samples(self, samples: Iterable[Sample]) -> None:
        """Refuse records, of any mode, of other samples under the same ids.

        Raises:
            DataError: naming the ids.
        """
        digests = {sample.id: sample.digest for sample in samples}
        records = self.records.values()
        changed = {r.id: None for r in records if digests.get(r.id, r.digest) != r.digest}
        if changed:
            raise DataError(
                f"{self.path} holds answers to other questions, or over other passages, under "
                f"{listed(list(changed))}. Name another file or delete this one."
            )

    def check_recipes(self, recipes: Mapping[str, str]) -> None:
        """Refuse records of a row whose recipe has changed.

        Args:
            recipes: Digests of the recipes, by row.

        Raises:
            DataError: A recipe has changed; the message names the row.
        """
        for record in self.records.values():
            if record.recipe != recipes.get(record.mode, record.recipe):
                raise DataError(
                    f"{self.path} holds records of {record.mode!r} made with another recipe than "
                    "the one found now. Name another file of records or delete this one."
                )

    def append(self, records: Iterable[R]) -> None:
        """Add records, on disk before this returns."""
        new = list(records)
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(_dump(record.to_dict()) for record in new)
        self.records.update({(record.id, record.mode): record for record in new})

    def _check_header(self, found: Any, header: Mapping[str, Any]) -> None:
        if not isinstance(found, dict) or found.keys() != header.keys():
            raise self._refusal(1, "not a record file (no settings there)")
        if found != json.loads(_dump(header)):
            raise OtherSettingsError(
                f"{self.path} holds records made with other settings. Found: {_dump(found).strip()}"
                f" expected: {_dump(header).strip()} Name another file or delete this one."
            )

    def _parse(self, number: int, line: bytes) -> Any:
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._refusal(number, f"not a record file ({error})") from error

    def _refusal(self, number: int, found: str) -> DataError:
        return DataError(f"{self.path}, line {number}: {found}; name another file")


def listed(ids: Sequence[str], most: int = 20) -> str:
    """Ids for a message, the first of them if there are many."""
    rest = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"the ids {', '.join(ids[:most])}{rest}"


def without_blank(line: dict[str, Any], name: str) -> dict[str, Any]:
    """A record's fields, without the one named if it is empty."""
    return line if line[name] else {key: value for key, value in line.items() if key != name}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
