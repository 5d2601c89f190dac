"""Strict checks of JSON from other processes. Each raises ProtocolError."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from reprlib import Repr
from typing import Any

from blockattn_rag.errors import ProtocolError
from blockattn_rag.store.namespaces import check_namespace

_MOST = 1 << 53
"""Larger integers are not exact in every JSON library."""

_repr = Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: object) -> str:
    """A value for a message, shortened."""
    if type(value) is int and abs(value) > _MOST:  # Python refuses to print very long integers
        return f"a number of {value.bit_length()} bits"
    return _repr.repr(value)


def record(
    value: object, name: str, required: Collection[str], optional: Collection[str] = ()
) -> Mapping[str, Any]:
    """Check for an object with exactly these fields."""
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
    """Check for an integer. Booleans and floats such as 3.0 are rejected."""
    if type(value) is int and least <= value <= most:
        return value
    limits = f"at least {least}" if most == _MOST else f"from {least} to {most}"
    raise ProtocolError(f"{name} must be a whole number {limits}, found {shown(value)}")


def real(value: object, name: str) -> float:
    """Check for a finite number of at least 0."""
    if type(value) in (int, float) and 0 <= value <= _MOST:  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    raise ProtocolError(f"{name} must be a number from 0, found {shown(value)}")


def one_of(value: object, name: str, choices: Collection[str]) -> str:
    """Check for one of several strings."""
    if isinstance(value, str) and value in choices:
        return value
    raise ProtocolError(f"{name} must be one of {', '.join(choices)}; found {shown(value)}")


def text(value: object, name: str, pattern: str, example: str) -> str:
    """Check for a string that matches a pattern completely."""
    if isinstance(value, str) and re.fullmatch(pattern, value, re.DOTALL):
        return value
    raise ProtocolError(f"{name} must be {example}, found {shown(value)}")


def sequence(value: object, name: str, least: int, most: int) -> list[Any] | tuple[Any, ...]:
    """Check for a list with ``least`` to ``most`` items."""
    if not isinstance(value, (list, tuple)):
        raise ProtocolError(f"{name} must be a list, found {shown(value)}")
    if not least <= len(value) <= most:
        number = f"{least}" if least == most else f"{least} to {most}"
        raise ProtocolError(f"{name} must have {number} items, found {len(value)}")
    return value


def hex_digest(value: object, name: str) -> str:
    """Check for 64 hex digits, such as a fingerprint."""
    return text(value, name, "[0-9a-f]{64}", "64 hex digits")


def sink_name(value: object) -> str:
    """Check for the form of a sink's name."""
    return text(value, "sink", "[a-z0-9:-]{1,32}", "a sink such as 'none' or 'head:4'")


def namespace_name(value: object) -> str:
    """Check for a namespace, which may be empty."""
    try:
        return check_namespace(value)
    except ValueError as error:
        raise ProtocolError(str(error)) from None
