"""What a database's passages were read from."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockattn_rag.adapters.handles import records_of
from blockattn_rag.app.rag.documents import SOURCE_KEY

if TYPE_CHECKING:
    from chromadb.api.models.Collection import Collection

_PASSAGES_PER_CALL = 1_000
_SOURCES_PER_CALL = 100


def all_sources(collection: Collection) -> list[str]:
    """Every source that passages of the collection name, sorted."""
    noted = (metadata or {} for (metadata,) in records_of(collection, "metadatas"))
    return sorted({str(metadata[SOURCE_KEY]) for metadata in noted if SOURCE_KEY in metadata})


def orphaned_sources(collection: Collection, unread: Container[str]) -> list[str]:
    """Files that are gone, or were left out when they were read last (``unread``), though their
    passages are still there."""
    return [name for name in all_sources(collection) if name in unread or _is_gone(Path(name))]


def _is_gone(path: Path) -> bool:
    try:
        return path.is_absolute() and not path.exists()
    except OSError:  # no permission to look
        return False


def ids_of(collection: Collection, sources: Sequence[str]) -> Iterator[str]:
    """Ids of the passages that come from these sources."""
    for at in range(0, len(sources), _SOURCES_PER_CALL):
        where: Any = {SOURCE_KEY: {"$in": list(sources[at : at + _SOURCES_PER_CALL])}}
        yield from collection.get(where=where, include=[])["ids"]


def delete_passages(collection: Collection, ids: Sequence[str]) -> None:
    """Delete passages, in calls that Chroma takes."""
    for at in range(0, len(ids), _PASSAGES_PER_CALL):
        collection.delete(ids=list(ids[at : at + _PASSAGES_PER_CALL]))
