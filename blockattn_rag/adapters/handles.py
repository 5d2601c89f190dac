"""Handles of passages beside their text in a vector store: written at ingestion, read by ``gc``.

A stored handle is a note, not a fact: vector stores change texts and keep old metadata (Chroma's
``upsert`` merges). A passage may therefore also carry the *source* of its handle, a digest of what
its text was made from; where that no longer agrees, the handle belongs to a text that is gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blockattn_rag.prompts.blocks import handle_of

HANDLE_KEY = "kv_handle"
"""Metadata key of a passage's handle."""

DIGEST_KEY = "kv_source"
"""Metadata key of the digest of what the handle was made from; see ``source_of``."""

TEXT_VARIABLE = "page_content"

_PAGE = 1000


def source_of(inputs: Mapping[str, Any]) -> str:
    """A digest of the named values that a passage's text was made from, with their names.

    Args:
        inputs: ``page_content`` and metadata values, by name.
    """
    names = sorted(inputs)
    values = [str(inputs[name]) for name in names]
    return f"{','.join(names)}:{handle_of(chr(0).join(f'{len(v)}:{v}' for v in values))}"


def live_handles(collections: Iterable[Any]) -> set[str]:
    """Handles of all passages in these Chroma collections: what ``store gc`` must keep.

    A handle whose recorded source does not agree with the record's text and metadata is left out:
    the text was replaced after the handle was made.
    """
    handles: set[str] = set()
    for collection in collections:
        for page in pages_of(collection, "metadatas", "documents"):
            for metadata, text in zip(page["metadatas"], page["documents"], strict=True):
                handle = metadata.get(HANDLE_KEY) if metadata else None
                # Other programs write metadata too: a value that is no string names no entry.
                if isinstance(handle, str) and handle and _agrees(metadata, text):
                    handles.add(handle)
    return handles


def pages_of(collection: Any, *include: str) -> Iterator[Any]:
    """All records of a Chroma collection, with these fields, in pages that Chroma takes."""
    for offset in range(0, collection.count(), _PAGE):
        yield collection.get(limit=_PAGE, offset=offset, include=list(include))


def _agrees(metadata: Mapping[str, Any], text: str | None) -> bool:
    source = metadata.get(DIGEST_KEY)
    if source is None:
        return True
    found = {TEXT_VARIABLE: text or "", **metadata}
    names = str(source).partition(":")[0].split(",")
    return all(name in found for name in names) and source == source_of(
        {name: found[name] for name in names}
    )
