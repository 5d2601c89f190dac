"""``blockattn-rag store``: inspection and maintenance of a KV store."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.adapters.handles import handles_in
from blockattn_rag.app.cli.options import StoreArgument, open_maintained, seconds_of
from blockattn_rag.app.cli.output import count, emit, json_file, note, plain, show, size, table
from blockattn_rag.app.cli.progress import counter
from blockattn_rag.app.rag.database import MANIFEST, Manifest, chroma_client, stored_collection
from blockattn_rag.app.rag.passages import all_passages
from blockattn_rag.errors import StoreError
from blockattn_rag.store.namespaces import check_namespace
from blockattn_rag.store.urls import bytes_of

if TYPE_CHECKING:
    from chromadb.api import ClientAPI

_GROUPS = ("models", "namespaces", "kv_dtypes")
_ALL = "*"
_HANDLE = re.compile(r"[0-9a-f]{32}")
_USERS = "a database folder, a folder of embedded Chroma, or a Chroma server (http://host:8000)"
_COLUMNS = ("model", "namespace", "kept in", "entries", "tokens", "size")

app = typer.Typer(no_args_is_help=True, help="Inspect and clean up a KV store.")


@app.command()
def gc(
    store: StoreArgument,
    db: Annotated[
        list[str] | None,
        typer.Option(help=f"Database whose passages are kept: {_USERS}. Repeatable."),
    ] = None,
    grace: Annotated[
        str, typer.Option(help="Keep entries used within this time, such as 90s, 30m, 24h or 7d.")
    ] = "1h",
    ttl: Annotated[
        str | None,
        typer.Option(
            help="Also delete entries that have not been used for this time, even if passages "
            "refer to them. Must be at least --grace. In object stores, the last write counts."
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Namespace to clean up, or '{_ALL}' for all. Repeatable. Default: the namespaces "
            "of the database folders, or the default namespace."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Report without deleting anything.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Allow deleting all entries if no passage is in use.")
    ] = False,
) -> None:
    """Delete entries that no passage refers to, or that are too old.

    Passages are in use if they are in Chroma (--db). If STORE is a database folder, that database's
    passages are also in use. Entries without a passage, such as the instructions before passages,
    are also deleted after the grace period, and encoded again when needed. With --ttl and no
    database, deletion depends only on the age of entries. For other vector stores, use
    blockattn_rag.store.gc in Python.
    """
    grace_s, ttl_s = seconds_of(grace, "--grace"), None if ttl is None else seconds_of(ttl, "--ttl")
    users = list(db or [])
    opened = open_maintained(store)
    if (Path(store) / MANIFEST).is_file():
        users.insert(0, store)
    namespaces: set[str] | None = None
    if _ALL not in (namespace or []):
        own = [read.namespace for user in users if (read := Manifest.read(Path(user)))]
        namespaces = {check_namespace(name) for name in namespace or own or [""]}
    looked_up_s = time.time()
    kept, names = _live_handles(users)
    by_age = ttl_s is not None and not users
    if not by_age and not kept and not force:
        raise ValueError(
            f"Found no handle in {count(len(names), 'collection')} of "
            f"{count(len(users), 'Chroma database')}, so every entry would be deleted; pass the "
            "databases that use this store (--db), use blockattn_rag.store.gc in Python for other "
            "vector stores, or pass --force"
        )
    # Passages added after the lookup may refer to stored entries, so the grace period starts at the
    # lookup.
    young_s = grace_s + max(0.0, time.time() - looked_up_s)
    if ttl_s is not None and ttl_s >= grace_s:
        ttl_s = max(ttl_s, young_s)
    with counter("entries judged") as tick:
        report = kv_store.gc(
            opened,
            None if by_age else kept,
            tick,
            grace_s=young_s,
            ttl_s=ttl_s,
            namespaces=namespaces,
            dry_run=dry_run,
            force=force,
        )
    for error in report.errors.first.values():
        note(f"note: {error}")
    data = asdict(report) | {"store": store, "collections": names, "live_handles": len(kept)}
    data["namespaces"] = None if namespaces is None else sorted(namespaces)
    verb = "Would delete" if dry_run else "Deleted"
    summary = (
        f"{verb} {count(report.deleted.count, 'entry')} and "
        f"{count(report.leftovers.count, 'temporary file')} "
        f"({size(report.freed_bytes)}); kept {report.kept} referred to and {report.kept_young} "
        f"used recently; {count(len(kept), 'handle')} in {count(len(names), 'collection')}"
    )
    if report.other:
        summary += f"; {count(report.other, 'entry')} in other namespaces ignored"
    emit(data, summary)
    if report.errors:
        raise typer.Exit(1)


def _live_handles(users: list[str]) -> tuple[set[str], list[str]]:
    clients = [_chroma(user) for user in users]
    collections = [collection for client in clients for collection in client.list_collections()]
    handles = set()
    with counter("handles read") as tick:
        for done, handle in enumerate(handles_in(collections), start=1):
            if _HANDLE.fullmatch(handle):
                handles.add(handle)
            if done % 1000 == 0:
                tick(done)
    return handles, [collection.name for collection in collections]


def _chroma(user: str) -> ClientAPI:
    if user.startswith(("http://", "https://")):
        from urllib.parse import urlsplit

        import chromadb
        from chromadb.config import Settings

        url, settings = urlsplit(user), Settings(anonymized_telemetry=False)
        is_safe = url.scheme == "https"
        return chromadb.HttpClient(
            url.hostname or "", url.port or (443 if is_safe else 8000), ssl=is_safe,
            settings=settings,
        )  # fmt: skip
    folder = Path(user)
    return chroma_client(folder / "chroma" if Manifest.read(folder) else folder)


@app.command()
def stats(store: StoreArgument) -> None:
    """Count entries, tokens and bytes by model, namespace and dtype."""
    kinds: dict[tuple[str, str, str], Counter[str]] = {}
    unreadable = kv_store.Tally()
    total: Counter[str] = Counter(entries=0, tokens=0, bytes=0)
    groups: dict[str, dict[str, Counter[str]]] = {name: {} for name in _GROUPS}
    with counter("entries read") as tick:
        for done, (key, info) in enumerate(kv_store.describe_all(open_maintained(store)), start=1):
            tick(done)
            if isinstance(info, StoreError):
                unreadable.add(key, str(info))
            elif info is not None:
                header = info.header
                kind = (header.fingerprint, header.namespace, header.kv_dtype)
                figures = {"entries": 1, "tokens": header.num_tokens, "bytes": info.nbytes}
                total.update(figures)
                kinds.setdefault(kind, Counter()).update(figures)
                for group, name in zip(groups.values(), kind, strict=True):
                    group.setdefault(name, Counter()).update(figures)
    if unreadable:
        note(f"note: unusable entries: {unreadable.count}; see `blockattn-rag store verify`")
    kinds["all", "", ""] = total
    rows = [
        (ascii(model)[1:-1][:12], ascii(namespace)[1:-1], kv_dtype, figures["entries"],
         figures["tokens"], size(figures["bytes"]))
        for (model, namespace, kv_dtype), figures in kinds.items()
    ]  # fmt: skip
    data = {"store": store, **total, **groups, "unreadable": asdict(unreadable)}
    emit(data, table(str(store), _COLUMNS, rows))


@app.command("ls")
def list_entries(store: StoreArgument) -> None:
    """List each entry's key, bytes, and time of last use (in object stores, of the last write)."""
    rows: Iterator[dict[str, Any]] = (
        {"key": entry.key, "bytes": entry.nbytes, "used": _time(entry.used_ns)}
        for entry in open_maintained(store).entries()
    )
    if (file := json_file()) is None:
        for row in rows:
            typer.echo(plain("  ".join(str(value) for value in row.values())))
        return
    # A single JSON object, written while entries are being listed.
    typer.echo(f'{{"store": {json.dumps(store)}, "entries": [', file, nl=False)
    for number, row in enumerate(rows):
        typer.echo(f"{', ' if number else ''}{json.dumps(row)}", file, nl=False)
    typer.echo("]}", file)


def _time(used_ns: int) -> str:
    try:
        return datetime.fromtimestamp(used_ns // 10**9, UTC).isoformat()
    except (ValueError, OverflowError):  # The time comes from a wrong clock.
        return f"{used_ns} ns"


@app.command()
def verify(
    store: StoreArgument,
    delete: Annotated[
        bool,
        typer.Option("--delete", help="Delete damaged entries, so that they are encoded again."),
    ] = False,
    sample: Annotated[
        str, typer.Option(help="Random fraction of the entries to read: 1% or 0.01.")
    ] = "100%",
) -> None:
    """Read and verify entries. The exit status is 1 if damaged or unreadable entries remain.

    Entries that could not be read because of insufficient memory or permissions may be intact. They
    are reported, but not deleted.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", sample.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(
            f"Expected a fraction such as 1% or 0.01, found {sample!r}", param_hint="--sample"
        )
    with counter("verified") as tick:
        report = kv_store.verify(
            open_maintained(store),
            tick,
            delete_damaged=delete,
            sample=share,
            seed=secrets.randbits(30),
            on_damage=None if json_file() else lambda key, why: show(f"{key}: {why}"),
        )
    data = asdict(report) | {"store": store, "bytes": report.total_bytes, "sample": share}
    for error in report.errors.first.values():
        note(f"note: {error}")
    summary = (
        f"{count(report.ok, 'entry')} intact ({size(report.total_bytes)}), {report.damaged.count} "
        f"damaged, {report.unread.count} unreadable, {report.deleted} deleted, "
        f"{count(report.leftovers.count, 'temporary file')}"
    )
    if report.skipped:
        summary += f"; {count(report.skipped, 'entry')} not in the sample"
    emit(data, summary)
    if report.damaged.count > report.deleted or report.unread:
        raise typer.Exit(1)


@app.command()
def index(store: StoreArgument) -> None:
    """Merge the files of the passage index, and drop passages that are not stored.

    For a database folder, missing passages are added, so that a deleted or damaged index is
    rebuilt.
    """
    with counter("entries read") as tick:
        from blockattn_rag.prompts.recognition import entries_of
        from blockattn_rag.store.passage_index import merge_index

        opened = open_maintained(store)
        manifest = Manifest.read(Path(store))
        added = {}
        if manifest is not None:
            texts = all_passages(stored_collection(Path(store)))
            added = {manifest.namespace: entries_of(texts)}
        report = merge_index(opened, added, tick)
    summary = f"{count(report.passages, 'passage')} in the index, {report.dropped} dropped"
    emit({"store": store, **report._asdict()}, summary)


@app.command()
def shrink(
    store: Annotated[str, typer.Argument(help="Folder of a KV store or a database.")],
    max_bytes: Annotated[
        str, typer.Option(help="Maximum size of the entries: 500MB, 20GB, 20GiB, or bytes.")
    ],
) -> None:
    """Delete the least recently used entries until the store is within a size limit.

    Entries are deleted even if passages refer to them, and encoded again when needed. In Python,
    `DirectoryStore(path, max_bytes=…)` limits a store's size permanently.
    """
    try:
        most = bytes_of(max_bytes.strip())
    except ValueError:
        most = 0
    if not most:
        raise typer.BadParameter(
            f"Expected a size such as 500MB, 20GB or 20GiB, found {max_bytes!r}",
            param_hint="--max-bytes",
        )
    opened = open_maintained(store)
    if not isinstance(opened, kv_store.DirectoryStore):
        raise ValueError(
            f"Expected a folder, found {opened!r}: other stores do not record when an entry was "
            "last used. Delete old entries with `blockattn-rag store gc STORE --ttl 30d`"
        )
    report = kv_store.shrink(opened, most)
    summary = (
        f"Deleted {count(len(report.deleted), 'entry')} ({size(report.freed_bytes)}); "
        f"the remaining entries take {size(report.left_bytes)}"
    )
    emit({**asdict(report), "store": store, "max_bytes": most}, summary)
