"""The command line, ``blockattn-rag``. Importing it loads neither torch nor a framework."""

from blockattn_rag.app.cli.app import app, main

__all__ = ["app", "main"]
