"""``blockattn-rag ingest`` and ``remove``: add files to a database, and remove them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag.app.cli.options import (
    DTYPE_HELP,
    KV_DTYPE_HELP,
    MODEL_HELP,
    DatabaseOption,
    KVDtypeName,
    RecipeOption,
    absolute_recipe,
    lasting_store,
)
from blockattn_rag.app.cli.output import count, duration, emit, fail, note, size
from blockattn_rag.app.cli.progress import stage_progress, stages, waiting
from blockattn_rag.app.rag.database import (
    AUTO_SETTING,
    Database,
    Manifest,
    has_passages,
    stored_collection,
)
from blockattn_rag.app.rag.documents import load_documents
from blockattn_rag.app.rag.ingest import ingest_documents
from blockattn_rag.app.rag.names import HASHING, MINILM, existing_model
from blockattn_rag.app.rag.passages import (
    all_sources,
    delete_passages,
    ids_of,
    orphaned_sources,
    sources_at,
)
from blockattn_rag.engine.outline import STOCK
from blockattn_rag.store.namespaces import check_namespace

if TYPE_CHECKING:
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.prompts.blocks import Block

INACCESSIBLE = 3
"""Exit status if files or folders could not be opened, but everything else was ingested."""
LARGE_BYTES = 1 << 30
"""Size of keys and values, in bytes, above which int8 is suggested."""
_HIDDEN = {"collection", "chunk_size", "template", "stock", "version"}
"""Settings that the command's JSON result omits."""


def _known_namespace(name: str | None) -> str | None:
    try:
        return name and check_namespace(name)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def ingest(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Files and folders to read.")
    ],
    db: Annotated[Path, typer.Option(help="Database folder. Created if it does not exist.")],
    model: Annotated[
        str | None,
        typer.Option(help=f"{MODEL_HELP} Default: the database's.", callback=existing_model),
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            min=16, help="Maximum length of a passage in tokens. Default: the database's, or 512."
        ),
    ] = None,
    embedding: Annotated[
        str | None,
        typer.Option(
            help=f"[bold]{HASHING}[/bold] (offline, no weights), [bold]{MINILM}[/bold], or another "
            f"sentence-transformers model. Default: the database's, or {HASHING}."
        ),
    ] = None,
    recipe: RecipeOption = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            help="Namespace in the store, such as a tenant's name. Blocks in a namespace are "
            "invisible to others. Default: the database's, or the default namespace.",
            callback=_known_namespace,
        ),
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store of keys and values: a folder, or an address such as s3://bucket/kv. "
            "Default: the database's, or its folder kv.",
            callback=lasting_store,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{DTYPE_HELP} Default: the database's, or auto.")
    ] = None,
    kv_dtype: Annotated[
        KVDtypeName | None, typer.Option(help=f"{KV_DTYPE_HELP} Default: the database's, or model.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of a server with the model and the store, such as http://gpu:8000. Its "
            "API key is read from BLOCKATTN_RAG_API_KEY, and --model is the local name of its "
            "tokenizer. Repeatable, for servers that share a store. Default: the database's."
        ),
    ] = None,
) -> None:
    """Read files, encode their passages, and make them searchable.

    Run the command again after an interruption, or when files have changed. Stored passages are
    skipped. The exit status is 3 if files or folders could not be opened; all others are ingested.
    """
    settings = _manifest(
        db,
        model=model,
        chunk_size=chunk_size,
        embedding=embedding,
        recipe=absolute_recipe(recipe),
        namespace=namespace,
        dtype=dtype,
        kv_dtype=kv_dtype,
        store=store,
        servers=server,
    )
    if not settings.servers:
        from blockattn_rag.model.loading import load_config

        load_config(settings.model)  # Check that the model exists before reading documents.
    with stage_progress("reading files") as tick:
        loaded = load_documents(paths, exclude=db, on_progress=tick)
    for file, reason in (*loaded.inaccessible, *loaded.skipped):
        note(f"Skipped: {file}: {reason}")
    if loaded.links:
        note(
            f"Skipped: {count(len(loaded.links), 'link')} pointing outside the folder, for example "
            f"{loaded.links[0]}; to read the target, pass the link as PATH"
        )
    note(f"{count(len(loaded.documents), 'document')} read; splitting into passages ...")
    with waiting(f"loading {settings.model}"):
        database = Database.create(db, settings)
    with stages() as report_progress:
        report = ingest_documents(
            database,
            loaded.documents,
            on_progress=report_progress,
            before_encoding=lambda blocks: _show_estimate(database.engine, blocks),
        )
    unread = {str(file) for file in (*dict(loaded.skipped), *loaded.links)}
    orphaned = orphaned_sources(database.collection, unread)
    if orphaned:
        others = f" and {len(orphaned) - 3} more" if len(orphaned) > 3 else ""
        note(
            f"note: these files are missing, skipped or empty, but {db} still has their passages: "
            f"{', '.join(orphaned[:3])}{others}; `blockattn-rag remove PATH --db {db}` removes them"
        )
    failed = dict(loaded.inaccessible)
    shared = report.passages - report.computed - report.reused
    data = {
        **asdict(report),
        "db": db,
        **{key: value for key, value in asdict(database.manifest).items() if key not in _HIDDEN},
        "orphaned": orphaned,
        "links": loaded.links,
        "skipped": [{"file": file, "reason": reason} for file, reason in loaded.skipped],
        "inaccessible": [{"path": path, "reason": reason} for path, reason in failed.items()],
    }
    emit(
        data,
        f"{count(report.documents, 'document')}, {count(report.passages, 'passage')}: "
        f"{report.added} added to Chroma, {report.removed} outdated removed, "
        f"{count(len(loaded.skipped) + len(failed), 'file')} skipped",
        f"{count(report.computed, 'block')} computed, {report.reused} reused: "
        f"{count(report.computed_tokens, 'token')} in {duration(report.encode_s)} "
        f"({report.tokens_per_s:.0f} tokens/s), {size(report.stored_bytes)} of keys and values "
        "stored" + (f"; shared with {count(shared, 'duplicate passage')}" if shared else ""),
        f"Done in {duration(report.total_s)} with {database.manifest.model}; recipe for block "
        f"mode: {database.recipe}",
        f'Ask: blockattn-rag ask "..." --db {db}',
    )
    if failed:
        listed = ", ".join(map(str, [*failed][:3])) + (", ..." if len(failed) > 3 else "")
        noun = "file or folder" if len(failed) == 1 else "files or folders"
        fail(
            f"Could not open {len(failed)} {noun}: {listed}; everything else was ingested. Check "
            "the permissions, and run the command again"
        )
        raise typer.Exit(INACCESSIBLE)


def _show_estimate(engine: BlockAttentionEngine, blocks: Sequence[Block]) -> None:
    """Print the estimated size and time of encoding blocks. Raises ValueError if they do not fit.

    In a store other than a folder, all blocks count as new, because each lookup is a request.
    """
    from blockattn_rag.lab.planning import footprint, measured_operations_per_s, prefill_flops
    from blockattn_rag.store import DirectoryStore

    model, store = engine.model, engine.store
    distinct = {block.handle: block for block in blocks}.values()
    folder = store.path if isinstance(store, DirectoryStore) else None
    new = [block for block in distinct if folder is None or not engine.contains(block)]
    if not new:
        return
    sizes = [len(model.tokenizer.block_ids(block, first=False)) for block in new]
    config = model.config.get_text_config(decoder=True)

    def stored_bytes(kv_dtype: KVDtypeName) -> int:
        return sum(map(footprint(config, model.dtype, kv_dtype).block_bytes, sizes))

    new_bytes, int8_bytes = stored_bytes(engine.kv_dtype), stored_bytes("int8")
    where = takes = ""
    free_bytes = None
    if folder is not None:
        existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        free_bytes = shutil.disk_usage(existing).free
        where = f" in {folder}, {size(free_bytes)} free"
    if hasattr(config, "intermediate_size"):
        speed = measured_operations_per_s(model.dtype, model.device.type)
        takes = f", about {duration(sum(prefill_flops(config, n) for n in sizes) / speed)}"
    note(
        f"{count(len(new), 'passage')} of {count(sum(sizes), 'token')} to encode: about "
        f"{size(new_bytes)} of keys and values{where}{takes}"
    )
    rate = new_bytes / sum(len(block.text.encode()) for block in new)
    note(f"1 MB of such text takes about {size(rate * 1_000_000)} with this model")
    saves = int8_bytes < new_bytes
    if free_bytes is not None and new_bytes > free_bytes:
        int8 = f" (int8 takes {size(int8_bytes)}: --kv-dtype int8)" if saves else ""
        raise ValueError(
            f"{folder} has {size(free_bytes)} free, but the keys and values of {len(new):,} "
            f"passages take about {size(new_bytes)}{int8}; free up space, ingest fewer files, or "
            "use another folder"
        )
    if new_bytes >= LARGE_BYTES and saves:
        note(
            f"note: with --kv-dtype int8 they would take about {size(int8_bytes)}, with nearly the "
            "same answers"
        )


def _manifest(db: Path, **options: Any) -> Manifest:
    old, model = Manifest.read(db), options["model"]
    if old is None and not model:
        raise typer.BadParameter("Required for a new database", param_hint="--model")
    if old is not None and model:
        path, was = Path(model).expanduser(), Path(old.model)
        is_same = old.model == (str(path.resolve()) if path.exists() else model)
        may_have_moved = was.is_absolute() and not was.exists()
        if not is_same and not may_have_moved and has_passages(db, old):
            raise ValueError(
                f"{db} has passages encoded by {old.model}, found --model {model}: remove --model, "
                "or ingest into a new folder. To query this database with another model, use "
                f"`blockattn-rag ask --db {db} --model {model}`"
            )
    chosen = {name: value for name, value in options.items() if value}
    if chosen.get("recipe") == AUTO_SETTING:
        chosen["stock"] = STOCK
    own = ("recipe", "namespace", "dtype", "kv_dtype", "store")
    if chosen.get("servers") and (clashing := [name for name in own if name in chosen]):
        raise typer.BadParameter(
            f"Cannot be combined with --server, which has its own {' and '.join(clashing)}",
            param_hint=f"--{clashing[0].replace('_', '-')}",
        )
    return replace(old, **chosen) if old else Manifest(**chosen)


def remove(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Files and folders, as passed to `ingest`."),
    ],
    db: DatabaseOption,
) -> None:
    """Remove files from a database. The files need not exist.

    The keys and values of their passages remain until `blockattn-rag store gc` deletes them.
    """
    collection = stored_collection(db)
    known = all_sources(collection)
    by_path = {path: sources_at(path, known) for path in paths}
    if absent := [str(path) for path, names in by_path.items() if not names]:
        files = count(len(known), "file")
        listed = f"it has {files}; the first is {known[0]}" if known else "it is empty"
        raise ValueError(f"{db} has no passages from {', '.join(absent)} ({listed})")
    sources = sorted({source for names in by_path.values() for source in names})
    ids = list(ids_of(collection, sources))
    delete_passages(collection, ids)
    # If no passage is left, gc requires --force.
    force = "" if collection.count() else " --force"
    emit(
        {"db": db, "sources": sources, "removed": len(ids)},
        f"{count(len(ids), 'passage')} of {count(len(sources), 'document')} removed",
        f"Free their keys and values: blockattn-rag store gc {db} --grace 0s{force}",
    )
