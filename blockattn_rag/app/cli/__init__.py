"""Command line ``blockattn-rag``. Importing this package loads neither torch nor LlamaIndex."""

from __future__ import annotations

import sys

from blockattn_rag.lazy import missing_extra


def main() -> None:
    """Run the command line and exit."""
    try:
        from blockattn_rag.app.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("rich", "typer"):
            raise
        sys.exit(f"error: The command line needs {missing_extra(error.name, 'cli')}")
    app(prog_name="blockattn-rag")
