"""Checks of what came from elsewhere as JSON: nothing is taken for granted, nothing ignored."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from reprlib import Repr
from typing import Any

from blockattn_rag.errors import ProtocolError
from blockattn_rag.store.namespaces import check_namespace

_MOST = 1 << 53
"""Beyond it, JSON's numbers are not exact everywhere."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: object) -> str:
    """A value for a message, cut short however long it is."""
    if type(value) is int and abs(value) > _MOST:  # Python spells no number of thousands of digits
        return f"a number of {value.bit_length()} bits"
    return _repr.repr(value)


def record(
    value: object, name: str, required: Collection[str], optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """An object that has these fields and no other.

    Raises:
        ProtocolError: it is something else; says what was found.
    """
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{name} must be an object, found {shown(value)}")
    unknown = [key for key in value if key not in required and key not in optional]
    absent = [key for key in required if key not in value]
    if unknown or absent:
        found = f"the unknown field {shown(unknown[0])}" if unknown else f"no field {absent[0]!r}"
        allowed = ", ".join([*required, *(f"{key} (optional)" for key in optional)])
        raise ProtocolError(f"{name} must have the fields {allowed} and no other; found {found}")
    return value


def whole(value: object, name: str, least: int = 0, most: int = _MOST) -> int:
    """A whole number; true and 3.0 are none. Raises ProtocolError."""
    if type(value) is int and least <= value <= most:
        return value
    limits = f"at least {least}" if most == _MOST else f"from {least} to {most}"
    raise ProtocolError(f"{name} must be a whole number {limits}, found {shown(value)}")


def real(value: object, name: str) -> float:
    """A finite number, at least 0. Raises ProtocolError."""
    if type(value) in (int, float) and 0 <= value <= _MOST:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ProtocolError(f"{name} must be a number from 0, found {shown(value)}")


def one_of(value: object, name: str, choices: Collection[str]) -> str:
    """One of some words. Raises ProtocolError."""
    if isinstance(value, str) and value in choices:
        return value
    raise ProtocolError(f"{name} must be one of {', '.join(choices)}; found {shown(value)}")


def text(value: object, name: str, pattern: str, example: str) -> str:
    """A text of which the whole is as the pattern says. Raises ProtocolError."""
    if isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL):
        return value
    raise ProtocolError(f"{name} must be {example}, found {shown(value)}")


def sequence(value: object, name: str, least: int, most: int) -> list[Any] | tuple[Any, ...]:
    """A list of so many items. Raises ProtocolError."""
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(f"{name} must be a list, found {shown(value)}")
    if not least <= len(value) <= most:
        number = f"{least}" if least == most else f"{least} to {most}"
        raise ProtocolError(f"{name} must have {number} items, found {len(value)}")
    return value


def hex_digest(value: object, name: str) -> str:
    """64 hex digits, such as a fingerprint's. Raises ProtocolError."""
    return text(value, name, "[0-9a-f]{64}", "64 hex digits")


def sink_name(value: object) -> str:
    """What looks like a sink's spelling. Raises ProtocolError."""
    return text(value, "sink", "[a-z0-9:-]{1,32}", "a sink such as 'none' or 'head:4'")


def namespace_name(value: object) -> str:
    """A namespace's name, or none. Raises ProtocolError."""
    try:
        return check_namespace(value)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
