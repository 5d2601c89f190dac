"""``blockattn-rag store``: what a KV store on disk holds, whether it is sound, what can go."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.adapters.handles import live_handles
from blockattn_rag.cli.figures import count, size
from blockattn_rag.cli.output import JsonOption, emit, note, progress, table, working
from blockattn_rag.errors import StoreError
from blockattn_rag.prompts.sinks import NO_SINK
from blockattn_rag.rag.database import MANIFEST, chroma_client, require_manifest

_GROUPS = ("models", "namespaces", "kv_dtypes")
_COLUMNS = ("model", "namespace", "kept in", "entries", "tokens", "size")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

app = typer.Typer(no_args_is_help=True, help="Inspect and clean a KV store.")
StoreArgument = Annotated[
    Path, typer.Argument(help="A KV store's folder, or a database folder made by `ingest`.")
]


@app.command()
def stats(store: StoreArgument, as_json: JsonOption = False) -> None:
    """How many entries there are, of which models, tenants and number types, and how large."""
    with working(as_json):
        opened = _open(store)
        kinds: dict[tuple[str, str, str], Counter[str]] = {}
        unreadable: dict[str, str] = {}
        for key in opened.keys():  # noqa: SIM118 - a store is no dict
            try:
                info = opened.describe(key)
            except StoreError as error:
                unreadable[key] = str(error)
                continue
            if info is None:
                continue
            kind = kinds.setdefault((info.fingerprint, info.namespace, info.kv_dtype), Counter())
            kind.update(entries=1, tokens=info.num_tokens, bytes=info.nbytes)
    total: Counter[str] = Counter(entries=0, tokens=0, bytes=0)
    groups: dict[str, dict[str, Counter[str]]] = {name: {} for name in _GROUPS}
    for kind_names, figures in kinds.items():
        total.update(figures)
        for group, name in zip(groups.values(), kind_names, strict=True):
            group.setdefault(name, Counter()).update(figures)
    data = {"store": store, **total, **groups, "unreadable": unreadable}
    rows = [
        (_shown(model), _plain(namespace), kv_dtype, m["entries"], m["tokens"], size(m["bytes"]))
        for (model, namespace, kv_dtype), m in kinds.items()
    ]
    rows.append(("all", "", "", total["entries"], total["tokens"], size(total["bytes"])))
    if unreadable:
        note(f"note: {len(unreadable)} more cannot be used; blockattn-rag store verify tells why")
    emit(as_json, data, table(str(store), _COLUMNS, rows))


@app.command()
def verify(
    store: StoreArgument,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete damaged entries; they are computed anew.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Read and check every entry; exit status 1 if any is damaged and was not deleted.

    What could not be read, for want of memory or permission, may be sound: it is told, is not
    deleted, and makes the exit status 1 too.
    """
    with working(as_json), progress("verifying") as tick:
        report = kv_store.verify(_open(store), tick, delete_damaged=delete)
    data = {
        "store": store,
        "ok": report.ok,
        "bytes": report.total_bytes,
        "damaged": report.damaged,
        "unread": report.unread,
        "deleted": report.deleted,
        "errors": report.errors,
        "leftovers": report.leftovers,
    }
    for error in report.errors:
        note(f"note: {error}")
    lines = [f"{key}: {reason}" for key, reason in (report.damaged | report.unread).items()]
    summary = (
        f"{count(report.ok, 'entry')} sound ({size(report.total_bytes)}), "
        f"{len(report.damaged)} damaged, {len(report.unread)} not readable, "
        f"{report.deleted} deleted, {count(len(report.leftovers), 'temporary file')}"
    )
    emit(as_json, data, *lines, summary)
    if len(report.damaged) > report.deleted or report.unread:
        raise typer.Exit(1)


@app.command()
def gc(
    store: StoreArgument,
    db: Annotated[
        list[Path] | None, typer.Option(help="A further database folder whose passages are kept.")
    ] = None,
    chroma_path: Annotated[
        list[Path] | None, typer.Option(help="Folder of an embedded Chroma, its passages are kept.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host of a Chroma server.")] = None,
    port: Annotated[int, typer.Option(help="Port of the Chroma server.")] = 8000,
    collection: Annotated[
        list[str] | None,
        typer.Option(help="Look at these collections only; default: all that are there."),
    ] = None,
    grace: Annotated[
        str, typer.Option(help="Keep entries that were used within this time: 90s, 30m, 24h, 7d.")
    ] = "1h",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only tell.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Go on although no passage is in use: delete all.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete entries that no passage in Chroma refers to (mark and sweep).

    A database folder's own collection always counts. Entries that hold no passage, such as the
    instructions before them, go too once they were not used for the grace period: they cost one
    computation.
    """
    grace_s = _seconds(grace)
    with working(as_json):
        opened = _open(store)
        folders = [*([store] if (store / MANIFEST).is_file() else []), *(db or [])]
        clients = [chroma_client(_chroma_of(folder)) for folder in folders]
        clients += [chroma_client(path) for path in chroma_path or []]
        if host:
            import chromadb
            from chromadb.config import Settings

            no_telemetry = Settings(anonymized_telemetry=False)
            clients.append(chromadb.HttpClient(host, port, settings=no_telemetry))
        wanted = set(collection or [])
        found = [c for client in clients for c in client.list_collections()]
        found = [c for c in found if not wanted or c.name in wanted]
        live = live_handles(found)
        names = [c.name for c in found]
        if missing := sorted(wanted - set(names)):
            raise ValueError(f"no such collection: {', '.join(missing)}")
        if not live and not force:
            raise ValueError(
                f"no handle found in {len(names)} collection(s) of {len(clients)} Chroma "
                "database(s), so that every entry would be deleted; name the Chroma databases "
                "that use this store (--db, --chroma-path, --host), or pass --force"
            )
        report = kv_store.gc(opened, live, grace_s=grace_s, dry_run=dry_run)
    for error in report.errors:
        note(f"note: {error}")
    data = {
        **asdict(report),
        "store": store,
        "collections": names,
        "live_handles": len(live),
    }
    verb = "would delete" if dry_run else "deleted"
    summary = (
        f"{verb} {count(len(report.deleted), 'entry')} and "
        f"{count(len(report.leftovers), 'temporary file')} "
        f"({size(report.freed_bytes)}); kept {report.kept} referred to and {report.kept_young} "
        f"used recently; {count(len(live), 'handle')} in {count(len(names), 'collection')}"
    )
    emit(as_json, data, summary)
    if report.errors:
        raise typer.Exit(1)


@app.command()
def shrink(
    store: StoreArgument,
    max_bytes: Annotated[
        str, typer.Option(help="What the entries may take: 500MB, 20GB, 20GiB, or bytes.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only tell.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the entries not used for the longest time, whatever refers to them, down to a size.

    They are computed anew when they are needed. In Python, `DirectoryStore(path, max_bytes=…)`
    keeps a store within a size all the time.
    """
    most = _bytes(max_bytes)
    with working(as_json):
        report = kv_store.shrink(_open(store), most, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    summary = (
        f"{verb} {count(len(report.deleted), 'entry')} ({size(report.freed_bytes)}); "
        f"the others take {size(report.left_bytes)}"
    )
    emit(as_json, {**asdict(report), "store": store, "max_bytes": most}, summary)


@app.command()
def migrate(
    store: StoreArgument,
    sink: Annotated[
        str | None,
        typer.Option(
            help="[bold]none[/bold]: you know that no block was encoded after a sink or corrected, "
            "as in stores that only block-fine-tuned models used."
        ),
    ] = None,
    drop: Annotated[
        bool,
        typer.Option("--drop", help="You do not: give the entries up; they are computed anew."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only tell.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Turn a store of format version 1 into one of today: in place, and without a model.

    Stop what uses the store first. After an interruption run it again: nothing is lost. Entries of
    version 1 do not tell what they were encoded after, so you must.
    """
    if (sink is None) == (not drop) or sink not in (None, "none"):
        raise typer.BadParameter(
            "entries of version 1 do not tell whether they were encoded after a sink or corrected: "
            "pass --sink none if you know that none was, or --drop to give them all up",
            param_hint="--sink",
        )
    with working(as_json), progress("migrating folders") as tick:
        folder = _folder(store)
        made = require_manifest(store).sink if folder != store else NO_SINK
        if made != NO_SINK and not drop:
            raise ValueError(f"{store} was ingested with the sink {made}; pass --drop")
        report = kv_store.migrate(folder, all_plain=not drop, dry_run=dry_run, progress=tick)
    for path, reason in report.damaged:
        note(f"damaged, {'would be ' * dry_run}deleted: {path}: {reason}")
    for error in report.errors:
        note(f"note: {error}")
    would = "would be " * dry_run
    summary = (
        f"{count(report.migrated, 'entry')} {would}migrated, {report.same} of the same tokens as "
        f"another, {report.dropped} {would}given up, {len(report.damaged)} damaged"
    )
    emit(as_json, {**asdict(report), "store": store}, summary)
    if report.errors:
        raise typer.Exit(1)


def _open(path: Path) -> kv_store.DirectoryStore:
    """The store in a folder that exists, or in a database folder."""
    return kv_store.DirectoryStore(_folder(path), create=False)


def _folder(path: Path) -> Path:
    folder = path / "kv" if (path / MANIFEST).is_file() else path
    if not folder.is_dir():
        raise FileNotFoundError(f"no such KV store: {folder}")
    return folder


def _chroma_of(folder: Path) -> Path:
    require_manifest(folder)
    return folder / "chroma"


def _shown(fingerprint: str) -> str:
    """The start of what a file says."""
    return _plain(fingerprint)[:12]


def _plain(text: str) -> str:
    """In ASCII, since it could hold a terminal's control codes."""
    return ascii(text)[1:-1]


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", text.strip().lower())
    power = " kmgt".index(match[2] or " ") if match else 0
    found = float(match[1]) * (1024 if match[3] else 1000) ** power if match else 0
    if found < 1:
        raise typer.BadParameter(
            f"expected a size such as 500MB, 20GB or 20GiB, found {text!r}",
            param_hint="--max-bytes",
        )
    return int(found)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise typer.BadParameter(
            f"expected a time such as 90s, 30m, 24h or 7d, found {text!r}", param_hint="--grace"
        )
    return float(match[1]) * _UNITS[match[2]]
