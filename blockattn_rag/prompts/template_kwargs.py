"""Variables of a chat template that applications set, such as ``enable_thinking``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from jinja2 import Environment
from jinja2.meta import find_undeclared_variables

# Set by this package, or given to templates by transformers.
_SET = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"),
        *("raise_exception", "strftime_now", "tojson", "chat_template", "tokenize", "return_dict"),
    }
)

# A tag of transformers, which names no variable and which jinja does not know.
_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def check_template_kwargs(tokenizer: Any, given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The variables as a dict.

    Args:
        tokenizer: whose chat template they are for.
        given: by name. Their values become text of the template, in which control tokens are
            parsed: they must come from the application, and never from its users.

    Raises:
        TypeError: they are no mapping with names.
        ValueError: the template reads no such variable, or this package sets it.
    """
    if not given:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise TypeError(
            "chat_template_kwargs must be a mapping of names, such as {'enable_thinking': False}, "
            f"found {given!r:.80}"
        )
    if taken := sorted(_SET & {*given}):
        raise ValueError(
            f"chat_template_kwargs sets {', '.join(taken)}, which this package sets itself: "
            "messages, tools and passages come with the call"
        )
    known = template_variables(tokenizer)
    if unknown := sorted({*given} - known):
        names = ", ".join(sorted(known)) or "none"
        raise ValueError(
            f"chat_template_kwargs sets {', '.join(unknown)}, which the chat template of this "
            f"model does not read; it reads: {names}"
        )
    return dict(given)


def template_variables(tokenizer: Any) -> frozenset[str]:
    """Variables that the chat template of a tokenizer reads and applications may set."""
    template = getattr(tokenizer, "chat_template", None) or ""
    sources = template.values() if isinstance(template, Mapping) else [template]
    return frozenset[str]().union(*map(_variables, sources)) - _SET


@lru_cache(maxsize=64)
def _variables(source: str) -> frozenset[str]:
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return frozenset(find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", source))))
