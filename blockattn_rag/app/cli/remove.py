"""``blockattn-rag remove``: removes files from a database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag.app.cli.options import DatabaseOption, JsonOption
from blockattn_rag.app.cli.output import count, emit, working
from blockattn_rag.app.rag.database import chroma_client, require_manifest
from blockattn_rag.app.rag.passages import all_sources, delete_passages, ids_of


def remove(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files and folders, as they were ingested."),
    ],
    db: DatabaseOption,
    as_json: JsonOption = False,
) -> None:
    """Remove files from a database, whether or not they still exist.

    The keys and values of their passages stay until `blockattn-rag store gc` deletes them.
    """
    with working(as_json):
        name = require_manifest(db).collection
        collection = chroma_client(db / "chroma").get_collection(name)
        known = all_sources(collection)
        wanted = {path: _at_or_below(path, known) for path in paths}
        if absent := [str(path) for path, found in wanted.items() if not found]:
            listed = f"it has {known[0]} and {len(known) - 1} more" if known else "it is empty"
            raise ValueError(f"{db} has nothing from {', '.join(absent)} ({listed})")
        sources = sorted({source for found in wanted.values() for source in found})
        ids = list(ids_of(collection, sources))
        delete_passages(collection, ids)
        # Without --force, gc refuses to delete everything.
        force = "" if collection.count() else " --force"
    emit(
        as_json,
        {"db": db, "sources": sources, "removed": len(ids)},
        f"{count(len(ids), 'passage')} of {count(len(sources), 'document')} removed",
        f"Free their keys and values: blockattn-rag store gc {db} --grace 0s{force}",
    )


def _at_or_below(path: Path, sources: list[str]) -> list[str]:
    """The sources at a path or in a folder.

    Sources are named by a resolved folder and the path in it, with links not resolved. So a link is
    looked up by its own name first, and then by its target's.
    """
    for place in (path.parent.resolve() / path.name, path.resolve()):
        if found := [source for source in sources if Path(source).is_relative_to(place)]:
            return found
    return []
