"""Registry of use cases. A use case is a small function that takes a kit and returns a result."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QUESTION = "What is the height of Halden Tower?"
SECOND_QUESTION = "What is the area of Lake Gulnock?"

Run = Callable[[Any], Any]


@dataclass(frozen=True)
class Use:
    """A common use case of a framework.

    ``by_format``: The framework describes an output format in the prompt and parses the answer
    itself. It passes no schema to the model class, so success depends only on the model.
    """

    framework: str
    name: str
    run: Run
    by_format: bool = False


USES: list[Use] = []

MODULES = (
    "langchain_chains",
    "langchain_models",
    "langchain_agents",
    "llama_index_engines",
    "llama_index_ingestion",
    "llama_index_models",
)
"""Modules that register use cases on import."""


def all_uses() -> list[Use]:
    """Return all use cases, in table order."""
    for module in MODULES:
        importlib.import_module(module)
    return USES


def langchain(name: str, *, by_format: bool = False) -> Callable[[Run], Run]:
    """Return a decorator that registers a use case of a ``LangChainKit``."""
    return _registers("LangChain", name, by_format)


def llama_index(name: str, *, by_format: bool = False) -> Callable[[Run], Run]:
    """Return a decorator that registers a use case of a ``LlamaIndexKit``."""
    return _registers("LlamaIndex", name, by_format)


def _registers(framework: str, name: str, by_format: bool) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        USES.append(Use(framework, name, run, by_format))
        return run

    return register
