"""Fixtures shared with the tests of the command line: documents and a tiny model."""

from tests.app.cli.conftest import documents, model

__all__ = ["documents", "model"]
