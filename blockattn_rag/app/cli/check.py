"""``blockattn-rag check``: does block mode work as it should, with this model or on this server?"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blockattn_rag.app.cli.figures import count, size
from blockattn_rag.app.cli.output import JsonOption, ModelArgument, emit, table, waiting, working
from blockattn_rag.app.rag.model_names import check_recipe, existing_model, loading

if TYPE_CHECKING:
    from blockattn_rag.check.checks import CheckReport
    from blockattn_rag.check.server import ServerReport
    from blockattn_rag.model import BlockModel


def check(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"{ModelArgument} With --server: its answers are compared with this model's.",
            callback=existing_model,
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="Check the server at this address, such as http://gpu:8000.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Where the server's tokenizer is found here. Default: MODEL's, or that of the "
            "name by which the server knows its model."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name at the server. Default: its base model's.")
    ] = None,
    api_key_env: Annotated[
        str, typer.Option(help="The environment variable with the server's API key.")
    ] = "BLOCKATTN_RAG_API_KEY",
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Check block mode with this recipe, too: auto, a sink such as head:4, or the "
            "folder of a recipe."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, mps.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    as_json: JsonOption = False,
) -> None:
    """Measure whether a model, or a server, answers in blocks as it should; exit status 0 if so,
    else 1.

    A server is asked from outside, with random tokens that nobody else asks for. What this leaves
    in its store is said at the end.
    """
    report: CheckReport
    if server is not None and recipe is not None:
        raise typer.BadParameter("--recipe is for a MODEL; a server has its own")
    if server is not None:
        with working(as_json):
            from blockattn_rag.check.server import check_server

            loaded = None if model is None else _loaded(model, device, dtype)
            report = on_server = check_server(
                server,
                loaded,
                tokenizer=tokenizer,
                served_name=served_model_name,
                api_key=os.environ.get(api_key_env),
            )
        _show(as_json, report, *_told_of_server(on_server))
    elif tokenizer or served_model_name:
        raise typer.BadParameter("--tokenizer and --served-model-name are of a --server; give one")
    elif model is not None:
        with working(as_json):
            from blockattn_rag.check.checks import check_model
            from blockattn_rag.engine.find_recipe import resolve_recipe
            from blockattn_rag.store import MemoryStore

            check_recipe(recipe)
            loaded = _loaded(model, device, dtype)
            checked = None
            if recipe is not None:
                checked = resolve_recipe(recipe, loaded, MemoryStore(1))
            with waiting("checking"):
                report = check_model(loaded, checked)
        told, lines = _told_of_model(model, report, loaded)
        _show(as_json, report, {**told, "recipe": checked and str(checked)}, lines)
    else:
        raise typer.BadParameter("expected a MODEL, or the address of a --server; found neither")
    if not report.passed:
        raise typer.Exit(1)


def _loaded(model: str, device: str, dtype: str) -> BlockModel:
    from blockattn_rag.model import BlockModel

    with waiting(f"loading {model}"), loading(model):
        return BlockModel.from_pretrained(model, device=device, dtype=dtype)


def _told_of_model(
    model: str, report: CheckReport, loaded: BlockModel
) -> tuple[dict[str, Any], list[str]]:
    """What is told of a model: for programs, and for people."""
    verdict = "usable in block mode" if report.passed else "NOT usable in block mode"
    told = {"model": model, "block_tuned": loaded.is_block_tuned, "fingerprint": loaded.fingerprint}
    return told, [verdict + _untuned(loaded.is_block_tuned)]


def _told_of_server(report: ServerReport) -> tuple[dict[str, Any], list[str]]:
    """What is told of a server: for programs, and for people."""
    info, left = report.info, count(report.left_blocks, "block")
    told = {
        "server": report.model,
        "model": info.models[0],
        "block_tuned": info.block_tuned,
        "fingerprint": info.fingerprint,
        "read_only": info.read_only,
        "left_blocks": report.left_blocks,
        "left_bytes": report.left_bytes,
    }
    if not report.has_blocks:
        verdict = "answers" if report.passed else "does NOT answer"
        reason = "; block mode was not asked for: the server is read-only, with no private_memory"
        return told, [f"{verdict} in full mode as it should{reason}"]
    verdict = "answers in block mode" if report.passed else "does NOT answer in block mode"
    lines = [f"{verdict} as it should{_untuned(info.block_tuned)}"]
    if report.left_blocks:
        lines.append(
            f"left in its store: {left} of random tokens, at most {size(report.left_bytes)}, which "
            "nobody else asks for; `blockattn-rag store gc` takes that away"
        )
    return told, lines


def _untuned(block_tuned: bool) -> str:
    if block_tuned:
        return ""
    return "; not known to be block-fine-tuned, so its answers will be less accurate there"


def _show(as_json: bool, report: CheckReport, told: dict[str, Any], lines: list[str]) -> None:
    shown = [
        (
            row.name,
            "yes" if row.passed else "NO",
            "-" if row.value is None else f"{row.value:.1e}",
            "-" if row.budget is None else f"{row.budget:.1e}",
            row.detail,
        )
        for row in report.rows
    ]
    columns = ("check", "passed", "found", "allowed", "detail")
    data = {**told, "passed": report.passed, "rows": [asdict(row) for row in report.rows]}
    emit(
        as_json, data, table(told.get("server", told["model"]), columns, shown, left=(0, 4)), *lines
    )
