"""How passages are encoded: those of an answer's options on which ingestion must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from blockattn_rag.engine.options import checked_option


class PassageEncoding(TypedDict):
    """How passages are encoded: ingestion and answers must agree on it. None: as the engine's own
    option says."""

    sink: str | None
    correction: str | None


def passage_encoding(options: Mapping[str, Any]) -> PassageEncoding:
    """Of the options of an answer, those by which passages are encoded.

    Raises:
        ValueError: one is of no known form, or its file is not there.
    """
    return {
        "sink": checked_option("sink", options["sink"]),
        "correction": checked_option("correction", options["correction"]),
    }
