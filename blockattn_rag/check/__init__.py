"""Checks for models and servers, and the oracle. Only tests and ``check`` import this package."""
