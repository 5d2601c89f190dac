"""``blockattn-rag store gc``: deletes entries that no passage refers to."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.adapters.handles import handles_in
from blockattn_rag.app.cli.options import StoreArgument, open_maintained, seconds_of
from blockattn_rag.app.cli.output import count, emit, note, size
from blockattn_rag.app.cli.progress import counter
from blockattn_rag.app.rag.database import MANIFEST, Manifest, chroma_client
from blockattn_rag.store.namespaces import check_namespace

if TYPE_CHECKING:
    from chromadb.api import ClientAPI

_ALL = "*"
_HANDLE = re.compile(r"[0-9a-f]{32}")
_USERS = "a database folder, a folder of embedded Chroma, or a Chroma server (http://host:8000)"


def gc(
    store: StoreArgument,
    db: Annotated[
        list[str] | None,
        typer.Option(help=f"User of the store: {_USERS}. Its passages are kept. Repeatable."),
    ] = None,
    grace: Annotated[
        str, typer.Option(help="Keep entries used within this time: 90s, 30m, 24h, 7d.")
    ] = "1h",
    ttl: Annotated[
        str | None,
        typer.Option(
            help="Also delete entries that were not used for this time, even if passages refer to "
            "them. In object stores, the time since an entry was written counts."
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Clean only this namespace, or '{_ALL}' for all. Repeatable. Default: the "
            "namespaces of the database folders, or the unnamed namespace."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Delete nothing, only report.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Delete every entry, even if no passage is in use.")
    ] = False,
) -> None:
    """Delete entries that no passage refers to, or that are old.

    Passages are in use if they are in Chroma (--db). For the store of a database folder, the
    passages of the database always count. Entries without a passage, such as the instructions
    before passages, are also deleted after the grace period, and recomputed when needed. With --ttl
    alone, only the age of entries matters. For other vector stores, use blockattn_rag.store.gc in
    Python.
    """
    grace_s, ttl_s = seconds_of(grace, "--grace"), None if ttl is None else seconds_of(ttl, "--ttl")
    users = list(db or [])
    opened = open_maintained(store)
    if (Path(store) / MANIFEST).is_file():
        users.insert(0, store)
    judged = _namespaces_of(namespace or [], users)
    looked_up_s = time.time()
    kept, names = _live_handles(users)
    by_age = ttl_s is not None and not users
    if not by_age and not kept and not force:
        raise ValueError(
            f"Found no handle in {count(len(names), 'collection')} of "
            f"{count(len(users), 'Chroma database')}, so every entry would be deleted; name "
            "the databases that use this store (--db), use blockattn_rag.store.gc in Python for "
            "another vector store, or pass --force"
        )
    # Passages added after the look-up may refer to stored entries, so the grace period starts
    # at the look-up.
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
            namespaces=judged,
            dry_run=dry_run,
            force=force,
        )
    for error in report.errors.first.values():
        note(f"note: {error}")
    data = asdict(report) | {"store": store, "collections": names, "live_handles": len(kept)}
    data["namespaces"] = None if judged is None else sorted(judged)
    verb = "Would delete" if dry_run else "Deleted"
    summary = (
        f"{verb} {count(report.deleted.count, 'entry')} and "
        f"{count(report.leftovers.count, 'temporary file')} "
        f"({size(report.freed_bytes)}); kept {report.kept} referred to and {report.kept_young} "
        f"used recently; {count(len(kept), 'handle')} in {count(len(names), 'collection')}"
    )
    if report.other:
        summary += f"; {count(report.other, 'entry')} in other namespaces not judged"
    emit(data, summary)
    if report.errors:
        raise typer.Exit(1)


def _live_handles(users: list[str]) -> tuple[set[str], list[str]]:
    clients = [_chroma(user) for user in users]
    collections = [collection for client in clients for collection in client.list_collections()]
    with counter("handles read") as tick:
        handles = set(_counted(handles_in(collections), tick))
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


def _namespaces_of(named: list[str], users: list[str]) -> set[str] | None:
    """Namespaces to clean: the given ones, or else the namespaces of the databases. None: all."""
    if _ALL in named:
        return None
    manifests = [Manifest.read(Path(user)) for user in users]
    own = [manifest.namespace for manifest in manifests if manifest is not None]
    return {check_namespace(name) for name in named or own or [""]}


def _counted(handles: Iterable[str], tick: Callable[[int], None]) -> Iterator[str]:
    for done, handle in enumerate(handles, start=1):
        if _HANDLE.fullmatch(handle):
            yield handle
        if done % 1000 == 0:
            tick(done)
