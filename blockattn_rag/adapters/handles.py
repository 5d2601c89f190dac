"""Handles in vector-store metadata. Ingestion writes them, and ``live_handles`` reads them.

Handles may be stale, because some vector stores keep old metadata when they replace a text
(Chroma's ``upsert`` merges metadata). A passage may therefore also have a digest of its text and
metadata (``DIGEST_KEY``). If the digest does not match these, the handle is stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from blockattn_rag.prompts.blocks import handle_of

HANDLE_KEY = "kv_handle"
"""Metadata key for a passage's handle."""

DIGEST_KEY = "kv_source"
"""Metadata key for the digest of the values that the handle depends on; see ``digest_of``."""

TEXT_VARIABLE = "page_content"

_PAGE = 1000


def digest_of(inputs: Mapping[str, Any]) -> str:
    """Compute a digest of the names and values that a passage was formatted with."""
    names = sorted(inputs)
    values = [str(inputs[name]) for name in names]
    return f"{','.join(names)}:{handle_of(chr(0).join(f'{len(v)}:{v}' for v in values))}"


def live_handles(places: Iterable[Any]) -> set[str]:
    """Collect the handles of all passages in vector stores, so that ``gc`` keeps their entries.

    Stale handles, whose digest does not match the passage's text and metadata, are excluded.

    Args:
        places: Chroma collections, LangChain documents, LlamaIndex nodes, or metadata mappings.

    Raises:
        TypeError: An item is of a different type.

    Example::

        gc(open_store("kv"), live_handles(index.docstore.docs.values()))
    """
    return set(handles_in(places))


def handles_in(places: Iterable[Any]) -> Iterator[str]:
    """Iterate over the handles of ``live_handles``, with duplicates."""
    for place in places:
        for metadata, text in _records(place):
            handle = metadata.get(HANDLE_KEY) if metadata else None
            # Other programs write metadata, too, so the value may not be a string.
            if isinstance(handle, str) and handle and _agrees(metadata, text):
                yield handle


def _records(place: Any) -> Iterable[tuple[Any, ...]]:
    """Return the metadata and text of each passage. The text is None if it is not available."""
    if isinstance(place, Mapping):
        return [(place, None)]
    # Check this before ``metadata``, because collections also have metadata.
    if hasattr(place, "count") and hasattr(place, "get"):
        return records_of(place, "metadatas", "documents")
    if isinstance(metadata := getattr(place, "metadata", None), Mapping):
        return [(metadata, getattr(place, "page_content", None))]
    raise TypeError(
        "Expected a Chroma collection, a document, a node or its metadata, found "
        f"{type(place).__name__}; for another vector store, pass its documents"
    )


def records_of(collection: Any, *fields: str) -> Iterator[tuple[Any, ...]]:
    """Read fields of all records in a Chroma collection, page by page."""
    for offset in range(0, collection.count(), _PAGE):
        page = collection.get(limit=_PAGE, offset=offset, include=list(fields))
        yield from zip(*(page[name] for name in fields), strict=True)


def _agrees(metadata: Mapping[str, Any], text: str | None) -> bool:
    if (source := metadata.get(DIGEST_KEY)) is None:
        return True
    names = str(source).partition(":")[0].split(",")
    if text is None and TEXT_VARIABLE in names:  # The text is needed to check the digest.
        return True
    inputs = {TEXT_VARIABLE: text, **metadata}
    # The digest includes the names, so it does not match if a value is missing.
    return digest_of({name: inputs[name] for name in names if name in inputs}) == str(source)
