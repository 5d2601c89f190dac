"""Checks of the fields of JSON records; a ``DataError`` says what was found and what was expected.

``where`` is the path to the record within its line, with a full stop at the end: ``passages[0].``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from blockattn_rag.errors import DataError

Record = Mapping[str, Any]
Kind = TypeVar("Kind")

_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


def of_kind(value: object, kind: type[Kind], name: str) -> Kind:
    """``value``, which must be a ``dict``, ``list``, ``str`` or ``bool``, as ``kind`` says."""
    if not isinstance(value, kind):
        found = "null" if value is None else _KINDS.get(type(value), "a number")
        raise DataError(f"found {name} of {found}, expected {_KINDS[kind]}")
    return value


def value_of(record: Record, key: str, where: str = "") -> Any:
    """The value of a key that must be there."""
    if key not in record:
        raise DataError(f"found no '{where}{key}' among the keys {listed(record)}")
    return record[key]


def text_of(record: Record, key: str, where: str = "") -> str:
    """A string that is not blank."""
    return not_blank(value_of(record, key, where), f"'{where}{key}'")


def not_blank(value: object, name: str) -> str:
    """``value``, which must be a string that is not blank."""
    text = of_kind(value, str, name)
    if not text.strip():
        raise DataError(f"found an empty {name}, expected text")
    return text


def list_of(record: Record, key: str, *, may_be_empty: bool = False) -> Sequence[object]:
    """A list, with at least one item unless ``may_be_empty``."""
    items: list[object] = of_kind(value_of(record, key), list, f"'{key}'")
    if not items and not may_be_empty:
        raise DataError(f"found an empty list '{key}'")
    return items


def listed(keys: Iterable[str]) -> str:
    """Keys in quotes, sorted, with commas between."""
    return ", ".join(repr(key) for key in sorted(keys)) or "none"
