"""The application: its commands, its global options, and how errors reach the user."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from blockattn_rag import __version__
from blockattn_rag.cli import (
    ask,
    bench,
    check,
    demo,
    evaluate,
    fingerprint,
    ingest,
    plan,
    remove,
    repair,
    store,
    train,
)
from blockattn_rag.cli.output import fail, note, plain
from blockattn_rag.errors import BlockAttnError

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells report it: 128 + SIGINT."""


class _OneLineErrors(TyperGroup):
    """Shows an error as one line and exits with status 1; ``--debug`` shows the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """No name of a file holds NUL, and what is called deep within would not say which does."""
        if damaged := next((argument for argument in args if "\0" in argument), None):
            raise typer.BadParameter(f"expected no NUL character in an argument, found {damaged!r}")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            fail("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of our output has gone (``| head``): there is no one left to tell.
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - closed by the interpreter's exit
            raise typer.Exit(1) from None
        except Exception as error:
            # The boundary to the user: whatever went wrong is told in one line. The errors of the
            # argument parser carry an exit status and know how to show themselves.
            if hasattr(error, "exit_code") or isinstance(error, typer.Abort) or ctx.params["debug"]:
                raise
            fail(_message(error))
            raise typer.Exit(1) from None


def _message(error: Exception) -> str:
    expected = (BlockAttnError, OSError, ValueError, TypeError, ImportError)
    text = " ".join(str(error).split())
    if isinstance(error, expected) and text:
        return text
    name = type(error).__name__
    return f"{name}: {text} (blockattn-rag --debug ... shows where)" if text else name


app = typer.Typer(
    name="blockattn-rag",
    cls=_OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Block-Attention for RAG: encode passages once, reuse them in every answer.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    demo.demo,
    ingest.ingest,
    remove.remove,
    ask.ask,
    check.check,
    fingerprint.fingerprint,
    train.train,
    repair.repair,
):
    app.command()(command)
app.command("eval")(evaluate.evaluate)
app.command("plan")(plan.plan)
app.add_typer(store.app, name="store")
app.add_typer(bench.app, name="bench")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"blockattn-rag {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and log details.")
    ] = False,
    version: Annotated[  # noqa: ARG001 - handled by its callback
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show version.")
    ] = False,
) -> None:
    """Block-Attention for RAG: encode passages once, reuse them in every answer."""
    # Both are read by huggingface_hub when it is imported.
    if not sys.stderr.isatty():  # no bars for loading weights in log files
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not debug:  # not each of its attempts: the error tells what came of them
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
        # Packages that set up logging as they are imported would show each request to a server.
        logging.getLogger("httpx").setLevel(logging.WARNING)
    logger = logging.getLogger("blockattn_rag")
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)
    if not any(isinstance(handler, _ToStderr) for handler in logger.handlers):
        logger.addHandler(_ToStderr())


class _ToStderr(logging.Handler):
    """Shows this package's warnings; those of ``rag``, which speak to the user, as notes. Libraries
    have handlers of their own, and one at the root would say theirs a second time."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "blockattn_rag.rag":
            note(f"note: {record.getMessage()}")
            return
        typer.echo(plain(f"{record.levelname} {record.name}: {record.getMessage()}"), err=True)


def main() -> None:
    """Run the command line and exit."""
    app(prog_name="blockattn-rag")
