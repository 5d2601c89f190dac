"""Traces: logs of requests, without their texts.

A trace is a file of JSON lines, one request a line, whose segments come in prompt order::

    {"segments": [{"id": "rules", "tokens": 212, "kind": "system"},
                  {"id": "doc-17", "tokens": 254, "kind": "passage"},
                  {"id": "q-1", "tokens": 19, "kind": "question"}]}

Equal ids stand for equal text. Passages are the segments of kind ``passage``; other kinds have no
meaning here. The last segment is the final block, and each one before it is a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockattn_rag.errors import DataError
from blockattn_rag.files import Record, of_kind, text_of, value_of
from blockattn_rag.lab.evaluation.datasets import parsed_lines


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt.

    Args:
        id: Identity of its text.
        tokens: Number of its tokens.
        kind: ``"passage"``, or anything else.
    """

    id: str
    tokens: int
    kind: str


Request = tuple[Segment, ...]


def read_trace(path: str | Path) -> list[Request]:
    """Read a trace from a ``.jsonl`` or ``.jsonl.gz`` file.

    Requests share the objects of equal segments, so a request takes a pointer per segment.

    Raises:
        DataError: A line is malformed, or gives a segment another number of tokens than an earlier
            line (the message names file and line); or the file is missing, damaged or empty.
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
            f"found {tokens} tokens for the id {found.id!r}, but {first.tokens} before; expected "
            "another id for another text"
        )
    return first if first == found else found


def distinct_blocks(requests: Sequence[Request], kind: str | None = None) -> list[Segment]:
    """The blocks of a trace, or those of one kind, each once."""
    blocks = {block.id: block for request in requests for block in request[:-1]}
    return [block for block in blocks.values() if kind in (None, block.kind)]
