"""``blockattn-rag ingest``: files into Chroma, their keys and values into the store."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from blockattn_rag.app.cli.addresses import whole_recipe, whole_store
from blockattn_rag.app.cli.figures import count, duration, size
from blockattn_rag.app.cli.output import (
    JsonOption,
    KVDtypeHelp,
    KVDtypeName,
    ModelArgument,
    RecipeOption,
    ServerOption,
    emit,
    note,
    progress,
    stages,
    waiting,
    working,
)
from blockattn_rag.app.rag.database import Database, Manifest, has_passages
from blockattn_rag.app.rag.documents import load_documents
from blockattn_rag.app.rag.embedding import HASHING
from blockattn_rag.app.rag.estimate import Estimate, check_room
from blockattn_rag.app.rag.ingest import ingest_documents
from blockattn_rag.app.rag.model_names import existing_model
from blockattn_rag.app.rag.sources import orphaned_sources
from blockattn_rag.app.rag.unused import unused_entries
from blockattn_rag.store.namespaces import check_namespace
from blockattn_rag.store.urls import lasts

_LARGE = 1 << 30
"""Bytes of keys and values from which int8 is suggested."""
_TOLD = (
    "model",
    "fingerprint",
    "embedding",
    "collection",
    "recipe",
    "namespace",
    "kv_dtype",
    "store",
    "server",
)


def _known_namespace(name: str | None) -> str | None:
    try:
        return name and check_namespace(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _known_store(spec: str | None) -> str | None:
    whole = whole_store(spec)
    if whole and not lasts(whole):
        raise typer.BadParameter("what is in memory ends with this command; name a lasting one")
    return whole


def ingest(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files and folders to read.")
    ],
    db: Annotated[Path, typer.Option(help="Database folder; made if it does not exist.")],
    model: Annotated[
        str | None,
        typer.Option(help=ModelArgument + " Default: the database's.", callback=existing_model),
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(min=16, help="Longest passage in tokens. Default: the database's, or 512."),
    ] = None,
    collection: Annotated[
        str | None, typer.Option(help="Chroma collection. Default: the database's, or passages.")
    ] = None,
    embedding: Annotated[
        str | None,
        typer.Option(
            help=f"[bold]{HASHING}[/bold] (words, offline) or a HuggingFace embedding's name. "
            f"Default: the database's, or {HASHING}."
        ),
    ] = None,
    recipe: RecipeOption = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Namespace of the keys and values in the store, such as a tenant's name: what is "
            "stored in one is no hit in another. Default: the database's, or none.",
            callback=_known_namespace,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Where keys and values go: a folder, or an address such as s3://bucket/kv. "
            "Default: the database's, or the folder kv in it.",
            callback=_known_store,
        ),
    ] = None,
    kv_dtype: Annotated[
        KVDtypeName | None,
        typer.Option(help=f"{KVDtypeHelp} Default: the database's, or model."),
    ] = None,
    server: ServerOption = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Read files, encode their passages, and make them searchable.

    Run it again after files changed or after an interruption: what is stored is not computed again.
    """
    with working(as_json):
        wanted = _manifest(
            db,
            model=model,
            chunk_size=chunk_size,
            collection=collection,
            embedding=embedding,
            recipe=whole_recipe(recipe),
            namespace=namespace,
            kv_dtype=kv_dtype,
            store=store,
            server=server,
        )
        with progress("reading files") as tick:
            loaded = load_documents(paths, exclude=db, on_progress=tick)
        for file, reason in loaded.skipped:
            note(f"left out: {file}: {reason}")
        if loaded.links:
            note(
                f"left out: {count(len(loaded.links), 'link')} out of the folders given, such as "
                f"{loaded.links[0]}; name what a link leads to if it is to be read"
            )
        note(f"{count(len(loaded.documents), 'document')} read; splitting into passages ...")
        with waiting(f"loading {wanted.model}"):
            database = Database.create(db, wanted, device=device, dtype=dtype)
        with stages() as tell:
            report = ingest_documents(
                database, loaded.documents, on_progress=tell, on_estimate=_show_estimate
            )
        unread = {str(file) for file in (*dict(loaded.skipped), *loaded.links)}
        orphaned = orphaned_sources(database.collection, unread)
        unused = unused_entries(database)
    if orphaned:
        others = f" and {len(orphaned) - 3} more" if len(orphaned) > 3 else ""
        note(
            f"note: gone, left out or without text, but still answering from {db}: "
            f"{', '.join(orphaned[:3])}{others}; `blockattn-rag remove PATH --db {db}` removes them"
        )
    if unused:
        note(
            f"note: {count(unused.entries, 'entry')} of {db} ({size(unused.nbytes)} of "
            f"{size(unused.total_bytes)}) belong to no passage any more; when no ingestion runs, "
            f"free them: blockattn-rag store gc {db} --grace 0s"
        )
    shared = report.passages - report.computed - report.reused
    data = {
        **asdict(report),
        "db": db,
        **{name: getattr(database.manifest, name) for name in _TOLD},
        "orphaned": orphaned,
        "unused": unused and asdict(unused),
        "links": loaded.links,
        "skipped": [{"file": file, "reason": reason} for file, reason in loaded.skipped],
    }
    emit(
        as_json,
        data,
        f"{count(report.documents, 'document')}, {count(report.passages, 'passage')}: "
        f"{report.added} added to Chroma, {report.removed} outdated removed, "
        f"{count(len(loaded.skipped), 'file')} left out",
        f"{count(report.computed, 'block')} computed, {report.reused} reused: "
        f"{count(report.computed_tokens, 'token')} in {duration(report.encode_s)} "
        f"({report.tokens_per_s:.0f} tokens/s), {size(report.stored_bytes)} of keys and values "
        "stored" + (f"; {count(shared, 'passage')} of equal text share them" if shared else ""),
        f"done in {duration(report.total_s)} with {database.manifest.model}; block mode runs with "
        f"the recipe {database.engine.recipe}",
        f'Ask: blockattn-rag ask "..." --db {db}',
    )


def _show_estimate(found: Estimate) -> None:
    """Print what is about to be computed, and refuse what the disk has no room for."""
    if not found.new_blocks:
        return
    where = f" in {found.folder}, {size(found.free_bytes)} free" if found.free_bytes else ""
    takes = "" if found.seconds is None else f", about {duration(found.seconds)}"
    note(
        f"{count(found.new_blocks, 'passage')} of {count(found.new_tokens, 'token')} to encode: "
        f"about {size(found.new_bytes)} of keys and values{where}{takes}"
    )
    check_room(found)
    if found.new_bytes >= _LARGE and found.int8_bytes < found.new_bytes:
        note(
            f"note: with --kv-dtype int8 they would take about {size(found.int8_bytes)}, at nearly "
            "the same answers"
        )


def _manifest(db: Path, **wanted: Any) -> Manifest:
    """What the options ask for, the rest as the database has it, or the defaults."""
    old = Manifest.read(db)
    if old is None and not wanted["model"]:
        raise typer.BadParameter("a new database needs a model", param_hint="--model")
    other = wanted["model"] and old is not None and not _is_model_of(old, wanted["model"])
    if old is not None and other and has_passages(db, old):
        raise ValueError(
            f"{db} holds passages encoded by {old.model}, found --model {wanted['model']}: leave "
            "out --model, or ingest into a new folder. To answer from this one by another model, "
            f"use `blockattn-rag ask --db {db} --model {wanted['model']}`"
        )
    given = {name: value for name, value in wanted.items() if value}
    own = ("recipe", "namespace", "kv_dtype", "store")
    if given.get("server") and (found := [name for name in own if name in given]):
        raise typer.BadParameter(
            f"a server has its own {' and '.join(found)}; leave that out",
            param_hint=f"--{found[0].replace('_', '-')}",
        )
    return replace(old, **given) if old else Manifest(**given, fingerprint="")


def _is_model_of(old: Manifest, model: str) -> bool:
    """Whether a name is that of the database's model, or that model's folder is gone: moved."""
    path, was = Path(model).expanduser(), Path(old.model)
    whole = str(path.resolve()) if path.exists() else model
    return whole == old.model or (was.is_absolute() and not was.exists())
