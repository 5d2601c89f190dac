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


def live_handles(places: Iterable[Any]) -> set[str]:
    """Handles of all these passages, of any vector store: what ``gc`` must keep.

    A handle whose recorded source does not agree with the passage's text and metadata is left out:
    the text was replaced after the handle was made.

    Args:
        places: Chroma collections, which are read whole; documents of LangChain; nodes of
            LlamaIndex; or the metadata of either, as a mapping.

    Raises:
        TypeError: one is none of these.

    Example::

        gc(open_store("kv"), live_handles(index.docstore.docs.values()))
    """
    return set(handles_in(places))


def handles_in(places: Iterable[Any]) -> Iterator[str]:
    """As ``live_handles``, one by one as they are read; one may come more than once."""
    for place in places:
        for metadata, text in _records(place):
            handle = metadata.get(HANDLE_KEY) if metadata else None
            # Other programs write metadata too: a value that is no string names no entry.
            if isinstance(handle, str) and handle and _agrees(metadata, text):
                yield handle


def _records(place: Any) -> Iterable[tuple[Any, ...]]:
    """Metadata and text of the passages that are meant; None for a text that is not known."""
    if isinstance(place, Mapping):
        return [(place, None)]
    if hasattr(place, "count") and hasattr(place, "get"):  # a collection has metadata of its own
        return records_of(place, "metadatas", "documents")
    if isinstance(metadata := getattr(place, "metadata", None), Mapping):
        return [(metadata, getattr(place, "page_content", None))]
    raise TypeError(
        "expected a Chroma collection, a document, a node or its metadata, found "
        f"{type(place).__name__}; of another vector store, give the documents that it holds"
    )


def records_of(collection: Any, *fields: str) -> Iterator[tuple[Any, ...]]:
    """These fields of all records of a Chroma collection, which are read page by page."""
    for offset in range(0, collection.count(), _PAGE):
        page = collection.get(limit=_PAGE, offset=offset, include=list(fields))
        yield from zip(*(page[name] for name in fields), strict=True)


def _agrees(metadata: Mapping[str, Any], text: str | None) -> bool:
    if (source := metadata.get(DIGEST_KEY)) is None:
        return True
    names = str(source).partition(":")[0].split(",")
    if text is None and TEXT_VARIABLE in names:  # nobody can tell
        return True
    inputs = {TEXT_VARIABLE: text, **metadata}
    # A missing input shows in the digest, which has the names of all.
    return source_of({name: inputs[name] for name in names if name in inputs}) == str(source)
