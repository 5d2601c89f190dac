"""``blockattn-rag store``: what a KV store holds, whether it is sound, what can go."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from blockattn_rag import store as kv_store
from blockattn_rag.app.cli import collect
from blockattn_rag.app.cli.addresses import (
    FolderArgument,
    StoreArgument,
    open_folder,
    open_maintained,
)
from blockattn_rag.app.cli.figures import count, size
from blockattn_rag.app.cli.output import (
    JsonOption,
    counter,
    emit,
    note,
    plain,
    table,
    working,
)
from blockattn_rag.errors import StoreError

_GROUPS = ("models", "namespaces", "kv_dtypes")
_COLUMNS = ("model", "namespace", "kept in", "entries", "tokens", "size")

app = typer.Typer(no_args_is_help=True, help="Inspect and clean a KV store.")


@app.command()
def stats(
    store: StoreArgument,
    quick: Annotated[
        bool, typer.Option("--quick", help="Count entries and bytes only, as they are listed.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """How many entries there are, of which models, tenants and number types, and how large."""
    with working(as_json):
        opened = open_maintained(store)
        if quick:
            listed = opened.stats()
            data = {"store": store, "entries": listed.entries, "bytes": listed.total_bytes}
        else:
            kinds, unreadable = _kinds(opened)
    if quick:
        shown = f"{store}: {count(listed.entries, 'entry')}, {size(listed.total_bytes)}"
        emit(as_json, data, shown)
        return
    total: Counter[str] = Counter(entries=0, tokens=0, bytes=0)
    groups: dict[str, dict[str, Counter[str]]] = {name: {} for name in _GROUPS}
    for kind_names, figures in kinds.items():
        total.update(figures)
        for group, name in zip(groups.values(), kind_names, strict=True):
            group.setdefault(name, Counter()).update(figures)
    rows = [
        (_shown(model), _plain(namespace), kv_dtype, m["entries"], m["tokens"], size(m["bytes"]))
        for (model, namespace, kv_dtype), m in kinds.items()
    ]
    rows.append(("all", "", "", total["entries"], total["tokens"], size(total["bytes"])))
    if unreadable:
        note(f"note: {unreadable.count} more cannot be used; blockattn-rag store verify tells why")
    data = {"store": store, **total, **groups, "unreadable": asdict(unreadable)}
    emit(as_json, data, table(str(store), _COLUMNS, rows))


def _kinds(
    opened: kv_store.MaintainedStore,
) -> tuple[dict[tuple[str, str, str], Counter[str]], kv_store.Tally]:
    """Entries, tokens and bytes by model, namespace and number type; what cannot be read."""
    kinds: dict[tuple[str, str, str], Counter[str]] = {}
    unreadable = kv_store.Tally()
    with counter("entries read") as tick:
        for done, (key, info) in enumerate(kv_store.describe_all(opened), start=1):
            tick(done)
            if isinstance(info, StoreError):
                unreadable.add(key, str(info))
            elif info is not None:
                kind = (info.fingerprint, info.namespace, info.kv_dtype)
                figures = {"entries": 1, "tokens": info.num_tokens, "bytes": info.nbytes}
                kinds.setdefault(kind, Counter()).update(figures)
    return kinds, unreadable


@app.command("ls")
def list_entries(
    store: StoreArgument,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Read headers, too: handle, tokens, tenant, model.")
    ] = False,
    limit: Annotated[int, typer.Option(min=0, help="How many entries to print; 0 for all.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """List entries, one a line: key, bytes, when last used (object stores: when written)."""
    with working(as_json):
        opened = open_maintained(store)
    rows = _long_rows(opened) if long else _rows(opened)
    rows = islice(rows, limit) if limit else rows
    if not as_json:
        for row in rows:
            typer.echo(plain("  ".join(str(value) for value in row.values())))
        return
    # One object, written as it is listed.
    typer.echo(f'{{"store": {json.dumps(store)}, "entries": [', nl=False)
    for number, row in enumerate(rows):
        typer.echo(f"{', ' if number else ''}{json.dumps(row)}", nl=False)
    typer.echo("]}")


def _rows(opened: kv_store.MaintainedStore) -> Iterator[dict[str, Any]]:
    for entry in opened.entries():
        yield {"key": entry.key, "bytes": entry.nbytes, "used": _time(entry.used_ns)}


def _long_rows(opened: kv_store.MaintainedStore) -> Iterator[dict[str, Any]]:
    for key, info in kv_store.describe_all(opened):
        if isinstance(info, StoreError):
            note(f"note: {key}: {info}")
        elif info is not None:
            yield {
                "key": key,
                "bytes": info.nbytes,
                "used": _time(info.used_ns),
                "handle": info.handle,
                "tokens": info.num_tokens,
                "kv_dtype": info.kv_dtype,
                "namespace": info.namespace,
                "model": info.fingerprint,
            }


def _time(used_ns: int) -> str:
    try:
        return datetime.fromtimestamp(used_ns // 10**9, UTC).isoformat()
    except (ValueError, OverflowError):  # a clock that was wrong by thousands of years
        return f"{used_ns} ns"


@app.command()
def verify(
    store: StoreArgument,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete damaged entries; they are computed anew.")
    ] = False,
    sample: Annotated[
        str, typer.Option(help="Read this share of the entries only: 1% or 0.01.")
    ] = "100%",
    seed: Annotated[
        int, typer.Option(help="Which share: 0, 1, 2, ... read each entry once in all.")
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """Read and check every entry; exit status 1 if any is damaged and was not deleted.

    What could not be read, for want of memory or permission, may be sound: it is told, is not
    deleted, and makes the exit status 1 too.
    """
    share = _share(sample)
    with working(as_json), counter("verified") as tick:
        report = kv_store.verify(
            open_maintained(store),
            tick,
            delete_damaged=delete,
            sample=share,
            seed=seed,
            found=None if as_json else lambda key, why: emit(False, {}, f"{key}: {why}"),
        )
    data = asdict(report) | {"store": store, "bytes": report.total_bytes, "sample": share}
    for error in report.errors.first.values():
        note(f"note: {error}")
    summary = (
        f"{count(report.ok, 'entry')} sound ({size(report.total_bytes)}), "
        f"{report.damaged.count} damaged, {report.unread.count} not readable, "
        f"{report.deleted} deleted, {count(report.leftovers.count, 'temporary file')}"
    )
    if report.skipped:
        summary += f"; {count(report.skipped, 'entry')} not in the sample"
    emit(as_json, data, summary)
    if report.damaged.count > report.deleted or report.unread:
        raise typer.Exit(1)


app.command()(collect.gc)
app.command()(collect.live)


@app.command()
def shrink(
    store: FolderArgument,
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
        report = kv_store.shrink(open_folder(store), most, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    summary = (
        f"{verb} {count(len(report.deleted), 'entry')} ({size(report.freed_bytes)}); "
        f"the others take {size(report.left_bytes)}"
    )
    emit(as_json, {**asdict(report), "store": store, "max_bytes": most}, summary)


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


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(%?)", text.strip())
    found = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < found <= 1:
        raise typer.BadParameter(
            f"expected a share such as 1% or 0.01, found {text!r}", param_hint="--sample"
        )
    return found
