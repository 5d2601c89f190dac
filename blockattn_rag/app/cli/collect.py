"""``blockattn-rag store gc`` and ``store live``: deleting what nothing refers to."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.adapters.handles import handles_in
from blockattn_rag.app.cli.addresses import StoreArgument, open_maintained
from blockattn_rag.app.cli.figures import count, size
from blockattn_rag.app.cli.output import JsonOption, counter, emit, note, working
from blockattn_rag.app.rag.database import MANIFEST, chroma_client, require_manifest
from blockattn_rag.store.namespaces import check_namespace

if TYPE_CHECKING:
    from chromadb.api import ClientAPI

_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

DatabaseOption = Annotated[
    list[Path] | None, typer.Option("--db", help="A database folder whose passages are kept.")
]
ChromaOption = Annotated[
    list[Path] | None, typer.Option(help="Folder of an embedded Chroma, its passages are kept.")
]
HostOption = Annotated[str | None, typer.Option(help="Host of a Chroma server.")]
PortOption = Annotated[int, typer.Option(help="Port of the Chroma server.")]
CollectionOption = Annotated[
    list[str] | None,
    typer.Option(help="Look at these collections only; default: all that are there."),
]


@dataclass(frozen=True, slots=True)
class _Sources:
    """Chroma databases whose passages are in use.

    Args:
        databases: folders made by ``ingest``.
        chroma: folders of embedded Chroma.
        host: of a Chroma server, at ``port``.
        collections: names of the ones to look at; none for all.
    """

    databases: list[Path]
    chroma: list[Path]
    host: str | None
    port: int
    collections: list[str]

    def handles(self) -> tuple[kv_store.LiveHandles, list[str], int]:
        """What is referred to, the names of the collections, and how many databases they are of."""
        looked_up = time.time()
        clients = self._clients()
        found = [each for client in clients for each in client.list_collections()]
        wanted = set(self.collections)
        found = [each for each in found if not wanted or each.name in wanted]
        names = [each.name for each in found]
        if missing := sorted(wanted - set(names)):
            raise ValueError(f"no such collection: {', '.join(missing)}")
        with counter("handles read") as tick:
            live = kv_store.LiveHandles(_counted(handles_in(found), tick), looked_up)
        return live, names, len(clients)

    def namespaces(self, named: list[str]) -> set[str]:
        """Whose entries are judged: those named, else the databases' own.

        Raises:
            ValueError: a name is none.
        """
        own = [require_manifest(folder).namespace for folder in self.databases]
        return {check_namespace(name) for name in named or own or [""]}

    def _clients(self) -> list[ClientAPI]:
        for folder in self.databases:
            require_manifest(folder)
        clients = [chroma_client(folder / "chroma") for folder in self.databases]
        clients += [chroma_client(path) for path in self.chroma]
        if self.host:
            import chromadb
            from chromadb.config import Settings

            no_telemetry = Settings(anonymized_telemetry=False)
            clients.append(chromadb.HttpClient(self.host, self.port, settings=no_telemetry))
        return clients


def live(
    db: DatabaseOption = None,
    chroma_path: ChromaOption = None,
    host: HostOption = None,
    port: PortOption = 8000,
    collection: CollectionOption = None,
) -> None:
    """Print what passages in Chroma refer to, for `store gc --handles FILE` on another machine.

    One handle a line. The first line tells when they were looked up, the last one their number.
    """
    sources = _Sources(db or [], chroma_path or [], host, port, collection or [])
    with working(True):
        handles, names, databases = sources.handles()
        if not databases:
            raise ValueError("name the Chroma databases: --db, --chroma-path or --host")
    for line in handles.lines():
        typer.echo(line)
    note(f"{count(len(handles), 'handle')} in {count(len(names), 'collection')}")


def gc(
    store: StoreArgument,
    db: DatabaseOption = None,
    chroma_path: ChromaOption = None,
    host: HostOption = None,
    port: PortOption = 8000,
    collection: CollectionOption = None,
    live_file: Annotated[
        list[Path] | None,
        typer.Option(
            "--handles",
            "--live",
            help="File of handles that are kept, one a line, or - for standard input: what any "
            "vector store's metadata holds as kv_handle, or what `store live` prints.",
        ),
    ] = None,
    grace: Annotated[
        str, typer.Option(help="Keep entries that were used within this time: 90s, 30m, 24h, 7d.")
    ] = "1h",
    ttl: Annotated[
        str | None,
        typer.Option(
            help="Delete what was not used for this time even if it is referred to. In object "
            "stores, which know no use but writing: what was written so long ago."
        ),
    ] = None,
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            help="Judge entries of this namespace, and leave others alone; may be given several "
            "times. Default: those of the database folders; without any, the one without a name."
        ),
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", help="Judge the entries of all tenants.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Delete nothing, only tell.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Go on although no passage is in use: delete all.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Delete entries that no passage refers to (mark and sweep), or that are old.

    Passages are those in Chroma, and those of other vector stores by --handles. Nothing is deleted
    unless every list could be read whole. A database folder's own collection always counts. Entries
    that hold no passage, such as the instructions before them, go too once they were not used for
    the grace period: they cost one computation. With --ttl and neither, age alone decides.
    """
    grace_s, ttl_s = _seconds(grace, "--grace"), None if ttl is None else _seconds(ttl, "--ttl")
    with working(as_json):
        opened = open_maintained(store)
        own = [Path(store)] if (Path(store) / MANIFEST).is_file() else []
        sources = _Sources([*own, *(db or [])], chroma_path or [], host, port, collection or [])
        judged = None if all_namespaces else sources.namespaces(namespace or [])
        kept, names, databases = sources.handles()
        files = [_listed(path) for path in live_file or []]
        if not force:
            _refuse_empty(live_file or [], files)
        if files:
            kept = _joined([kept, *files])
        by_age = ttl_s is not None and not databases and not files
        if not by_age and not kept and not force:
            raise ValueError(
                f"no handle found in {len(names)} collection(s) of {databases} Chroma "
                "database(s), so that every entry would be deleted; name the Chroma databases "
                "that use this store (--db, --chroma-path, --host), list the handles of another "
                "vector store (--handles), or pass --force"
            )
        # What was stored before the look-up and referred to after it counts as young.
        young_s = grace_s + max(0.0, time.time() - kept.looked_up)
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
            )
    for error in report.errors.first.values():
        note(f"note: {error}")
    data = asdict(report) | {"store": store, "collections": names, "live_handles": len(kept)}
    data["namespaces"] = None if judged is None else sorted(judged)
    verb = "would delete" if dry_run else "deleted"
    summary = (
        f"{verb} {count(report.deleted.count, 'entry')} and "
        f"{count(report.leftovers.count, 'temporary file')} "
        f"({size(report.freed_bytes)}); kept {report.kept} referred to and {report.kept_young} "
        f"used recently; {count(len(kept), 'handle')} in {count(len(names), 'collection')}"
    )
    if files:
        summary += f" and {count(len(files), 'list')}"
    if report.other:
        summary += f"; {count(report.other, 'entry')} of other namespaces left alone"
    emit(as_json, data, summary)
    if report.errors:
        raise typer.Exit(1)


def _listed(path: Path) -> kv_store.LiveHandles:
    """The handles of a file, or of standard input."""
    if str(path) == "-":
        return kv_store.LiveHandles.parse(sys.stdin, "standard input", looked_up=time.time())
    return kv_store.LiveHandles.read(path)


def _refuse_empty(paths: list[Path], lists: list[kv_store.LiveHandles]) -> None:
    """A program that failed leaves an empty list, also where other lists are whole.

    Raises:
        ValueError: a list is empty.
    """
    if empty := [str(path) for path, handles in zip(paths, lists, strict=True) if not handles]:
        raise ValueError(
            f"no handle found in the list {', '.join(empty)}, so that whatever it was to name "
            "would be deleted; see whether the program that wrote it failed, leave it out if there "
            "is nothing to name, or pass --force"
        )


def _joined(parts: list[kv_store.LiveHandles]) -> kv_store.LiveHandles:
    """All of them, as old as the oldest."""
    handles = (handle for part in parts for handle in part)
    return kv_store.LiveHandles(handles, min(part.looked_up for part in parts))


def _counted(handles: Iterable[str], tick: Callable[[int], None]) -> Iterator[str]:
    """Handles as the package spells them: other programs write metadata too, and what is none
    names no entry."""
    from blockattn_rag.store.live import is_handle

    for done, handle in enumerate(handles, start=1):
        if is_handle(handle):
            yield handle
        if done % 1000 == 0:
            tick(done)


def _seconds(text: str, option: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip())
    if match is None:
        raise typer.BadParameter(
            f"expected a time such as 90s, 30m, 24h or 7d, found {text!r}", param_hint=option
        )
    return float(match[1]) * _UNITS[match[2]]
