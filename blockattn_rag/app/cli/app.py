"""Typer application: registration of commands, global options, error output and logging."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from blockattn_rag import __version__
from blockattn_rag.app.cli import (
    ask,
    check,
    demo,
    evaluate,
    ingest,
    plan,
    repair,
    serve,
    store,
    train,
)
from blockattn_rag.app.cli.output import fail, note, printing
from blockattn_rag.errors import BlockAttnError
from blockattn_rag.lazy import missing_extra

_ANYWHERE = ("-v", "--verbose", "--json")
"""Global options that are also accepted after a command."""
_EXTRA_OF = {
    **dict.fromkeys(("chromadb", "llama_index", "llama_index_instrumentation"), "llama-index"),
    **dict.fromkeys(("sklearn", "turbohtml", "webencodings"), "llama-index"),
    **dict.fromkeys(("accelerate", "datasets", "matplotlib", "peft"), "train"),
    "httpx": "serving",
    "llguidance": "structured",
    "obstore": "s3",
    "redis": "redis",
}
"""Maps a module to the extra that installs it."""
_DEQUANTIZING = "blockattn_rag.model.gguf"
"""Logger that reports the dequantization of a GGUF file."""


class _OneLineErrors(TyperGroup):
    """Command group that prints an error as one line, or as a traceback with ``--debug``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Accept ``_ANYWHERE`` options after a command. Reject NUL, which no file name contains."""
        if damaged := next((argument for argument in args if "\0" in argument), None):
            raise typer.BadParameter(f"Found a NUL character in {damaged!r}; remove it")
        own = args[: args.index("--")] if "--" in args else args
        moved = dict.fromkeys(argument for argument in own if argument in _ANYWHERE)
        rest = [argument for argument in own if argument not in _ANYWHERE]
        return super().parse_args(ctx, [*moved, *rest, *args[len(own) :]])

    def invoke(self, ctx: Any) -> Any:
        try:
            with printing(ctx.params["as_json"]):
                return super().invoke(ctx)
        except KeyboardInterrupt:
            fail("Interrupted")
            raise typer.Exit(130) from None  # 128 + SIGINT, as in shells.
        except BrokenPipeError:
            # The process that reads the pipe has exited, as with ``| head``.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - closed by the interpreter's exit
            raise typer.Exit(1) from None
        except Exception as error:
            # The argument parser's errors have an exit status, and Typer prints them.
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort) or ctx.params["debug"]:
                raise
            fail(_message(error))
            raise typer.Exit(1) from None


def _message(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        if package in _EXTRA_OF:
            return f"This command needs {missing_extra(package, _EXTRA_OF[package])}"
    expected = (BlockAttnError, OSError, ValueError, TypeError, ImportError)
    text = " ".join(str(error).split())
    if isinstance(error, expected) and text:
        return text
    name = type(error).__name__
    return f"{name}: {text} (blockattn-rag --debug ... shows the traceback)" if text else name


app = typer.Typer(
    name="blockattn-rag",
    cls=_OneLineErrors,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(demo.demo)
app.command()(ingest.ingest)
app.command()(ask.ask)
app.command()(ingest.remove)
app.command()(repair.repair)
app.command()(train.train)
app.command("eval")(evaluate.evaluate)
app.command()(check.check)
app.command()(plan.plan)
app.add_typer(store.app, name="store")
app.command(cls=serve.WithVllmOptions)(serve.serve)


def _show_version(is_set: bool) -> None:
    if is_set:
        typer.echo(f"blockattn-rag {__version__}")
        raise typer.Exit


@app.callback()
def options(
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Log loading, retrieval and reuse. Also valid after a command."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and detailed logs.")
    ] = False,
    as_json: Annotated[  # noqa: ARG001 - see _OneLineErrors.invoke
        bool,
        typer.Option("--json", help="Print the result as JSON. Also valid after a command."),
    ] = False,
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version.")
    ] = False,
) -> None:
    """Block-Attention for RAG: encode passages once, reuse them in every answer."""
    # huggingface_hub and tqdm read these variables on import.
    if not sys.stderr.isatty():  # No progress bars in log files.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
    if not debug:  # Hide library warnings: the error line is sufficient.
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        # If another package configures logging, these two log each request or model load.
        for package in ("httpx", "sentence_transformers"):
            logging.getLogger(package).setLevel(logging.WARNING)
    logger = logging.getLogger("blockattn_rag")
    usual = logging.INFO if verbose else logging.WARNING
    logger.setLevel(logging.DEBUG if debug else usual)
    # Dequantizing a file takes minutes on first use, so the start is always logged.
    logging.getLogger(_DEQUANTIZING).setLevel(logging.DEBUG if debug else logging.INFO)
    logger.propagate = False  # Another package's handler would print the message again.
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())


class _ToStderr(logging.Handler):
    """Handler that prints the package's log on stderr.

    Warnings from ``app.rag``, and the message about dequantization, start with ``note:`` instead of
    level and logger. A handler on the root logger would print the logs of some libraries twice.
    """

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        if record.name == _DEQUANTIZING or (record.name == "blockattn_rag.app.rag" and is_warning):
            note(f"note: {record.getMessage()}")
        else:
            note(f"{record.levelname} {record.name}: {record.getMessage()}")
