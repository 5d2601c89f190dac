"""``blockattn-rag serve``: run vLLM with this package's connector."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from blockattn_rag.app.cli.check import rows_table
from blockattn_rag.app.cli.options import (
    MODEL_HELP,
    DtypeOption,
    RecipeOption,
    absolute_recipe,
    lasting_store,
)
from blockattn_rag.app.cli.output import count, duration, note, plain, show, stderr
from blockattn_rag.app.cli.progress import waiting
from blockattn_rag.app.rag.names import existing_model
from blockattn_rag.errors import ServingError

if TYPE_CHECKING:
    from blockattn_rag.server.protocol import ServerInfo

_KEY = "VLLM_API_KEY"
_QUESTION = "What is the height of Halden Tower?"
_DOCUMENTS = [{"text": "The height of Halden Tower is 214 metres."}]


class WithVllmOptions(TyperCommand):
    """Command that collects all arguments after ``--`` in ``ctx.args``, for vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:end])
        ctx.args = options = args[end + 1 :]
        return options


def serve(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP, callback=existing_model)] = None,
    store: Annotated[
        str | None,
        typer.Option(
            help="Store of keys and values: a folder, or an address such as s3://bucket/kv.",
            callback=lasting_store,
        ),
    ] = None,
    db: Annotated[
        Path | None,
        typer.Option(help="Database whose model, store, recipe, dtypes and namespace are used."),
    ] = None,
    recipe: RecipeOption = None,
    dtype: DtypeOption = "auto",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    recognize: Annotated[
        bool,
        typer.Option(
            help="Recognize stored passages in text that OpenAI clients send without markers, "
            "except in system messages."
        ),
    ] = False,
    sources: Annotated[
        bool,
        typer.Option(
            help="Do the same as --recognize, and also store and reuse text that chat front ends, "
            "such as Open WebUI, mark as sources."
        ),
    ] = False,
) -> None:
    """Serve a model with vLLM, reusing stored passages. Ctrl-C stops the server.

    Pass vLLM options after --, such as -- --max-model-len 8192. The command waits until the server
    is ready, checks its answers, and prints its address. The API key, if any, is read from
    VLLM_API_KEY.
    """
    from blockattn_rag.app.rag.database import Manifest
    from blockattn_rag.app.serving import server_options, settings_of
    from blockattn_rag.server import launch

    launch.require_vllm()
    launch.check_options(ctx.args)
    launch.require_port(host, port)
    if db is not None:
        if model or store or recipe or dtype != "auto":
            raise typer.BadParameter(
                "A database already has a model, store, recipe and dtype; remove these arguments"
            )
        settings = settings_of(db)
    elif model is None or store is None:
        raise typer.BadParameter("Expected a MODEL and a --store, or a database (--db)")
    else:
        chosen = absolute_recipe(recipe) or "auto"
        settings = Manifest(model, store=store, recipe=chosen, dtype=dtype)
    recognition = {"recognize": "sources" if sources else True} if sources or recognize else {}
    with _ending_on_signals():
        with waiting(f"reading {settings.model}"):
            conflicting = launch.prevents_recomputing(ctx.args)
            options = server_options(settings, db and db.resolve(), conflicting)
        command = launch.vllm_command(
            options.source,
            name=settings.model,
            dtype=options.dtype,
            revision=options.revision,
            connector={**options.connector, **recognition},
            host=host,
            port=port,
            options=ctx.args,
        )
        note(shlex.join(command))

        def log(line: str) -> None:
            typer.echo(plain(line), err=True)

        with launch.VllmServer(command, launch.vllm_environment(os.environ), log) as server:
            address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
            url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
            server.wait_until_healthy(
                address, port, lambda seconds: note(f"Waiting for vLLM: {duration(seconds)}")
            )
            info = _check(url, address)
            show(f"{info.models[0]} is served at {url}", _curl(url, info))
            note("Ctrl-C stops the server")
            server.run()


def _check(url: str, address: str) -> ServerInfo:
    """Check the server's answers, and return its info. Raises ServingError if a check fails."""
    from blockattn_rag.check.server import check_server
    from blockattn_rag.server import ServerClient

    # Do not send local requests to a proxy.
    proxied = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = f"{proxied},{address}".strip(",")
    with waiting("checking the server"):
        report = check_server(ServerClient(url, os.environ.get(_KEY)))
    if not report.passed:
        stderr.print(rows_table(url, report))
        raise ServingError("The server did not pass its checks; it will be stopped")
    note(f"The server works correctly: {count(len(report.rows), 'check')} passed")
    return report.info


def _curl(url: str, info: ServerInfo) -> str:
    from blockattn_rag.server.protocol import OPENAI

    prompt: dict[str, Any]
    if info.has_chat_template:
        path, prompt = "chat/completions", {"messages": [{"role": "user", "content": _QUESTION}]}
    else:
        path, prompt = "completions", {"prompt": f"Question: {_QUESTION}\nAnswer:"}
    body = {"model": info.models[0], **prompt, "documents": _DOCUMENTS, "temperature": 0}
    key = [f'-H "Authorization: Bearer ${_KEY}"'] if os.environ.get(_KEY) else []
    words = [f"curl {url}{OPENAI}/{path}", *key, "-H 'Content-Type: application/json'"]
    return " ".join([*words, "-d", shlex.quote(json.dumps(body))])


@contextlib.contextmanager
def _ending_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT, and exit with status 0 on SIGTERM and SIGHUP.

    Without a handler, background commands of a shell script ignore SIGINT, and a container's first
    process ignores SIGTERM. An ignored SIGHUP stays ignored, as ``nohup`` requires.
    """
    handlers: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: lambda *_: sys.exit(0),
    }
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = handlers[signal.SIGTERM]
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
