"""``blockattn-rag remove``: files out of the database."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag.app.cli.figures import count
from blockattn_rag.app.cli.output import JsonOption, emit, working
from blockattn_rag.app.rag.database import chroma_client, require_manifest
from blockattn_rag.app.rag.sources import all_sources, delete_passages, ids_of


def remove(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files and folders as they were ingested."),
    ],
    db: Annotated[Path, typer.Option(help="Database folder, made by `blockattn-rag ingest`.")],
    as_json: JsonOption = False,
) -> None:
    """Remove the passages of files from the search, whether or not the files still exist.

    Their keys and values stay until `blockattn-rag store gc` collects them.
    """
    with working(as_json):
        name = require_manifest(db).collection
        collection = chroma_client(db / "chroma").get_collection(name)
        known = all_sources(collection)
        wanted = {path: _at_or_below(path, known) for path in paths}
        if absent := [str(path) for path, found in wanted.items() if not found]:
            listed = f"{known[0]} is one of {len(known)}" if known else "it holds none"
            raise ValueError(f"{db} has nothing from {', '.join(absent)} ({listed})")
        sources = sorted({source for found in wanted.values() for source in found})
        ids = list(ids_of(collection, sources))
        delete_passages(collection, ids)
        # An empty collection looks to gc as if it were the wrong one.
        force = "" if collection.count() else " --force"
    emit(
        as_json,
        {"db": db, "sources": sources, "removed": len(ids)},
        f"{count(len(ids), 'passage')} of {count(len(sources), 'document')} removed",
        f"Free their keys and values: blockattn-rag store gc {db} --grace 0s{force}",
    )


def _at_or_below(path: Path, sources: list[str]) -> list[str]:
    """Sources are named by a resolved folder and what lies below it, links as they stand: what a
    link leads to counts only where the link itself is none."""
    for place in (path.parent.resolve() / path.name, path.resolve()):
        if found := [source for source in sources if Path(source).is_relative_to(place)]:
            return found
    return []
