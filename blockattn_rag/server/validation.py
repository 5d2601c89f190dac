"""Validates JSON from other processes, such as request bodies, with pydantic."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterable, Mapping
from functools import cache
from reprlib import Repr
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from blockattn_rag.errors import ProtocolError
from blockattn_rag.store.namespaces import check_namespace

_MOST = 1 << 53  # JSON libraries may not represent larger integers exactly.
_MOST_FIELDS = 100  # For more unknown fields, pydantic could take seconds to build its errors.
_OTHER_BODY_BYTES = 4 << 20  # Grammars have up to 2 million characters.
_BODY_BYTES_PER_TOKEN = 64

STRICT = ConfigDict(extra="forbid")
"""Pydantic config of requests, responses, plans and options: unknown fields are errors."""

Count = Annotated[int, Field(strict=True, ge=0, le=_MOST)]
Positive = Annotated[int, Field(strict=True, ge=1, le=_MOST)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
AdapterDigest = Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
SinkName = Annotated[str, Field(pattern="^[a-z0-9:-]{1,32}$")]
Namespace = Annotated[str, AfterValidator(check_namespace)]

T = TypeVar("T")

_repr = Repr()
_repr.maxstring = _repr.maxother = 80


def shown(value: object) -> str:
    """Format a value for a message, and truncate it."""
    if type(value) is int and abs(value) > _MOST:  # Python cannot print very long integers
        return f"an integer of {value.bit_length()} bits"
    return _repr.repr(value)


def parse(kind: type[T], value: object, name: str) -> T:
    if isinstance(value, Mapping) and len(value) > _MOST_FIELDS:
        raise ProtocolError(f"{name} has {len(value)} fields, expected at most {_MOST_FIELDS}")
    try:
        parsed: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        raise ProtocolError(_explained(error, name)) from None
    return parsed


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the validator of a type, cached because creating one is slow."""
    return TypeAdapter(kind)


def as_object(value: object, name: str) -> dict[str, Any]:
    """Return a copy of a JSON object. Raises ProtocolError for other values."""
    if not isinstance(value, Mapping):
        raise ProtocolError(f"{name} should be an object, found {shown(value)}")
    return dict(value)


def check_version(value: object, field: str, version: int, name: str) -> dict[str, Any]:
    """Check that ``field`` of a JSON object is ``version``, and return the object without it."""
    fields = as_object(value, name)
    found = fields.pop(field, None)
    if type(found) is not int or found != version:
        raise ProtocolError(
            f"Found version {shown(found)} of {name}, expected {version}: use releases of this "
            "package with the same protocol version on both sides"
        )
    return fields


def _explained(error: ValidationError, name: str) -> str:
    first = error.errors(include_url=False)[0]
    # vLLM's models use wrapped validators, which pydantic names function-wrap[...].
    *path, last = [part for part in first["loc"] if not str(part).startswith("function-")] or ("",)
    place = name + "".join(f"[{p}]" if type(p) is int else f".{p}" for p in path if p != "")
    if first["type"] == "missing":
        return f"{place} is missing the field {last!r}; add it"
    if first["type"] == "unexpected_keyword_argument":
        return f"{place} has the unknown field {shown(last)}; remove it"
    place += f"[{last}]" if type(last) is int else f".{last}" * (last != "")
    if first["type"] == "value_error":
        return f"{place}: {first['ctx']['error']}"
    if first["type"] == "dataclass_type":
        return f"{place} should be an object, found {shown(first['input'])}"
    expected = re.sub(" after validation, not .*", "", first["msg"].partition(" ")[2])
    return f"{place} {expected.replace('tuple', 'list')}, found {shown(first['input'])}"


async def read_json(chunks: AsyncIterable[bytes], max_tokens: int) -> Any:
    """Read and parse a JSON body. Raises ProtocolError if it is too large or not valid JSON."""
    most, body = _OTHER_BODY_BYTES + _BODY_BYTES_PER_TOKEN * max_tokens, bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > most:
            raise ProtocolError(
                f"The body is larger than {most:,} bytes, the limit for {max_tokens:,} tokens "
                "(max_model_len); send fewer or shorter texts or blocks, and pass media by URL"
            )
    try:
        return await asyncio.to_thread(json.loads, body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"The body is not valid JSON: {error}") from error
