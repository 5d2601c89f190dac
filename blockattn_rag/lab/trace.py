"""Traces: logs of requests, without their texts.

A trace is a JSON Lines file with one request per line. Its segments are in prompt order::

    {"segments": [{"id": "rules", "tokens": 212, "kind": "system"},
                  {"id": "doc-17", "tokens": 254, "kind": "passage"},
                  {"id": "q-1", "tokens": 19, "kind": "question"}]}

Segments with equal ids have equal text. Segments of kind ``passage`` are passages; all other kinds
are treated alike. The last segment is the final block, and every other segment is a context block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockattn_rag.errors import DataError
from blockattn_rag.lab.json_lines import Record, of_kind, parsed_lines, text_of, value_of


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt.

    Args:
        id: Identity of the text.
        tokens: Number of tokens.
        kind: ``"passage"``, or any other string.
    """

    id: str
    tokens: int
    kind: str


Request = tuple[Segment, ...]


def read_trace(path: str | Path) -> list[Request]:
    """Read a trace from a ``.jsonl`` or ``.jsonl.gz`` file.

    To save memory, equal segments are one object, which all requests share.

    Raises:
        DataError: A line is malformed, or an id has another number of tokens than on an earlier
            line (the message gives file and line); or the file is missing, damaged or empty.
    """
    known: dict[str, Segment] = {}
    return [request for _, request in parsed_lines(path, lambda line, _: _request(line, known))]


def _request(record: Record, known: dict[str, Segment]) -> Request:
    listed = of_kind(value_of(record, "segments"), list, "'segments'")
    if not listed:
        raise DataError("found no segment in 'segments', expected at least the question")
    segments = []
    for i, segment in enumerate(listed):
        try:
            segments.append(_segment(of_kind(segment, dict, "a segment"), known))
        except DataError as error:
            raise DataError(f"segments[{i}]: {error}") from error
    return tuple(segments)


def _segment(record: Record, known: dict[str, Segment]) -> Segment:
    tokens = value_of(record, "tokens")
    if type(tokens) is not int or tokens < 1:
        raise DataError(f"found {tokens!r} as 'tokens', expected a whole number above 0")
    found = Segment(text_of(record, "id"), tokens, text_of(record, "kind"))
    first = known.setdefault(found.id, found)
    if first.tokens != tokens:
        raise DataError(
            f"found {tokens} tokens for the id {found.id!r}, which had {first.tokens} before; give "
            "each text its own id"
        )
    return first if first == found else found


def distinct_blocks(requests: Sequence[Request], kind: str | None = None) -> list[Segment]:
    """The distinct context blocks of a trace, or only the blocks of one kind."""
    blocks = {block.id: block for request in requests for block in request[:-1]}
    return [block for block in blocks.values() if kind in (None, block.kind)]
