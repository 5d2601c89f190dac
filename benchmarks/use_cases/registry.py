"""The list of uses. A use is a small function that takes a kit and returns the use's result."""

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
    """A common use of a framework.

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
"""Modules that register their uses on import."""


def all_uses() -> list[Use]:
    """The uses in the table's order."""
    for module in MODULES:
        importlib.import_module(module)
    return USES


def langchain(name: str, *, by_format: bool = False) -> Callable[[Run], Run]:
    """Register a use of a ``LangChainKit``."""
    return _registers("LangChain", name, by_format)


def llama_index(name: str, *, by_format: bool = False) -> Callable[[Run], Run]:
    """Register a use of a ``LlamaIndexKit``."""
    return _registers("LlamaIndex", name, by_format)


def _registers(framework: str, name: str, by_format: bool) -> Callable[[Run], Run]:
    def register(run: Run) -> Run:
        USES.append(Use(framework, name, run, by_format))
        return run

    return register
