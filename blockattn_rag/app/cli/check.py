"""``blockattn-rag check``: check that block mode is exact for a model, or works on a server."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag.app.cli.options import MODEL_HELP, DtypeOption
from blockattn_rag.app.cli.output import emit, table
from blockattn_rag.app.cli.progress import waiting
from blockattn_rag.app.rag.names import check_recipe, existing_model

if TYPE_CHECKING:
    from rich.console import RenderableType

    from blockattn_rag.check.model import CheckReport

_API_KEY = "BLOCKATTN_RAG_API_KEY"
Result = tuple["CheckReport", dict[str, Any], list[str]]
"""Report, additional fields of the JSON object, and lines below the table."""


def check(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, callback=existing_model)] = None,
    server: Annotated[
        str | None,
        typer.Option(
            help=f"Server to check, such as http://gpu:8000. Its API key is read from {_API_KEY}."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Also check block mode with this recipe: auto, settings such as fast, or a "
            "recipe folder."
        ),
    ] = None,
    dtype: DtypeOption = "auto",
) -> None:
    """Check that block mode is exact for a model, or that a server answers correctly.

    The exit status is 0 if all checks pass, else 1. For a server, the command asks a question in
    both modes, and prints both answers if they differ.
    """
    if (server is None) == (model is None):
        found = "neither" if model is None else "both"
        raise typer.BadParameter(f"Expected either MODEL or --server; found {found}")
    if server is not None:
        if recipe is not None:
            raise typer.BadParameter("--recipe requires MODEL; a server already has a recipe")
        report, fields, lines = _check_server(server)
    else:
        assert model is not None
        report, fields, lines = _check_model(model, recipe, dtype)
    title = str(fields.get("server", fields["model"]))
    data = {**fields, "passed": report.passed, "rows": [asdict(row) for row in report.rows]}
    emit(data, rows_table(title, report), *lines)
    if not report.passed:
        raise typer.Exit(1)


def rows_table(title: str, report: CheckReport) -> RenderableType:
    rows = [
        (
            row.name,
            "yes" if row.passed else "NO",
            "-" if row.value is None else f"{row.value:.1e}",
            "-" if row.budget is None else f"{row.budget:.1e}",
            row.detail,
        )
        for row in report.rows
    ]
    return table(title, ("check", "passed", "found", "allowed", "detail"), rows, left=(0, 4))


def _check_model(name: str, recipe: str | None, dtype: str) -> Result:
    from blockattn_rag.check.model import check_model
    from blockattn_rag.engine.find_recipe import resolve_recipe
    from blockattn_rag.model import BlockModel
    from blockattn_rag.store import MemoryStore

    check_recipe(recipe)
    with waiting(f"loading {name}"):
        model = BlockModel.from_pretrained(name, dtype=dtype)
    used = None if recipe is None else resolve_recipe(recipe, model, MemoryStore(1))
    with waiting("checking"):
        report = check_model(model, used)
    fields = {
        "model": name,
        "block_tuned": model.is_block_tuned,
        "fingerprint": model.fingerprint,
        "recipe": used and str(used),
    }
    verdict = "usable in block mode" if report.passed else "NOT usable in block mode"
    lines = [verdict + _untuned(model.is_block_tuned), f"fingerprint {model.fingerprint}"]
    return report, fields, lines


def _check_server(url: str) -> Result:
    from blockattn_rag.check.server import check_server
    from blockattn_rag.server import ServerClient

    with waiting(f"checking {url}"):
        report = check_server(ServerClient(url))
    info, block, full = report.info, report.block, report.full
    fields = {
        "server": report.model,
        "model": info.models[0],
        "block_tuned": info.block_tuned,
        "fingerprint": info.fingerprint,
        "recipe": str(info.recipe),
        "read_only": info.read_only,
        "block": block,
        "full": full,
    }
    verdict = "works correctly" if report.passed else "does NOT work correctly"
    if block is None:
        reason = "block mode was not checked: the server is read-only and lacks these passages"
        return report, fields, [f"{verdict} in full mode; {reason}"]
    lines = [f"{verdict} in block mode{_untuned(info.block_tuned)}"]
    if block == full:
        lines += [f"both modes answer: {block}"]
    else:
        lines += [f"block mode answers: {block}", f"full mode answers: {full}"]
    return report, fields, lines


def _untuned(block_tuned: bool) -> str:
    return "" if block_tuned else "; not block-fine-tuned, so block-mode answers are less accurate"
