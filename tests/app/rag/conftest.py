"""The folder of documents and the tiny model of the command line's tests."""

from tests.app.cli.conftest import documents, model

__all__ = ["documents", "model"]
