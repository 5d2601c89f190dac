"""``blockattn-rag store pin``, ``unpin`` and ``ttl``: how long passages are kept."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.app.cli.options import StoreArgument, open_maintained, seconds_of
from blockattn_rag.app.cli.output import count, emit
from blockattn_rag.app.cli.store_gc import namespaces_of
from blockattn_rag.app.rag.database import stored_collection
from blockattn_rag.app.rag.passages import all_sources, handles_of_sources, sources_at
from blockattn_rag.store.namespaces import is_of

HandlesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[HANDLE]...", help="Handles of passages: kv_handle in their metadata."),
]
SourceOption = Annotated[
    list[Path] | None,
    typer.Option(help="File or folder whose passages are meant; STORE is their database folder."),
]
_ALWAYS = "always"
NamespaceOption = Annotated[
    str | None,
    typer.Option(help="Namespace of the entries. Default: the database's, or the unnamed one."),
]


def pin(
    store: StoreArgument,
    handles: HandlesArgument = None,
    source: SourceOption = None,
    duration: Annotated[
        str | None, typer.Option("--for", help="Time to keep them: 30m, 24h, 7d. Default: always.")
    ] = None,
    namespace: NamespaceOption = None,
) -> None:
    """Keep passages in the store: no size limit, `gc` or `shrink` deletes them.

    Entries that are encoded later, for example with another model, are not pinned.
    """
    until_s = None if duration is None else time.time() + seconds_of(duration, "--for")
    from blockattn_rag.store import retention

    opened, keys = _found(store, handles, source, namespace)
    retention.pin(opened, keys, until_s)
    emit({"store": store, "pinned": keys}, f"{count(len(keys), 'entry')} pinned")


def unpin(
    store: StoreArgument,
    handles: HandlesArgument = None,
    source: SourceOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Let passages that were pinned be deleted again."""
    from blockattn_rag.store import retention

    opened, keys = _found(store, handles, source, namespace)
    done = retention.unpin(opened, keys)
    emit({"store": store, "unpinned": done}, f"{count(done, 'entry')} unpinned")


def ttl(
    store: StoreArgument,
    duration: Annotated[
        str,
        typer.Option(
            "--for", help=f"Time to live from now on: 30m, 24h, 7d, or {_ALWAYS} to remove it."
        ),
    ],
    handles: HandlesArgument = None,
    source: SourceOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """Let passages expire: then `gc` deletes them even if they are in use, and size limits first.

    Until then they are used as before. Pinned entries are kept.
    """
    at_s = None if duration == _ALWAYS else time.time() + seconds_of(duration, "--for")
    from blockattn_rag.store import retention

    opened, keys = _found(store, handles, source, namespace)
    if at_s is None:
        retention.keep_forever(opened, keys)
    else:
        retention.expire(opened, keys, at_s)
    verb = "kept" if at_s is None else f"will expire in {duration}"
    data = {"store": store, "entries": keys, "expires_at": at_s}
    emit(data, f"{count(len(keys), 'entry')} {verb}")


def _found(
    store: str, handles: list[str] | None, sources: list[Path] | None, namespace: str | None
) -> tuple[kv_store.MaintainedStore, list[str]]:
    """The store, and the keys of the entries of these passages.

    Raises:
        ValueError: No passages are named, or a passage has no entry in the namespace.
    """
    wanted = set(handles or [])
    if sources:
        collection = stored_collection(Path(store))
        known = all_sources(collection)
        for path in sources:
            if not (named := sources_at(path, known)):
                raise ValueError(f"{store} has no passages from {path}")
            wanted |= handles_of_sources(collection, named)
    if not wanted:
        raise ValueError("expected handles or --source, found neither")
    from blockattn_rag.store.base import EntryInfo

    opened = open_maintained(store)
    names = namespaces_of([] if namespace is None else [namespace], [store])
    keys, seen = [], set()
    for key, info in kv_store.describe_all(opened):
        if not isinstance(info, EntryInfo) or not (
            names is None or is_of(info.header.namespace, names)
        ):
            continue
        if there := wanted & set(info.handles):
            keys.append(key)
            seen |= there
    if missing := sorted(wanted - seen):
        raise ValueError(
            f"found no entry of {count(len(missing), 'handle')}, the first is {missing[0]}; "
            "ingest the passages first, or name their --namespace"
        )
    return opened, keys
