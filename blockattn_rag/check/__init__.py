"""Checks of models and servers, and the oracle. Imported only by tests and ``check``."""
