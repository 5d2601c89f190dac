"""One question to the engine, checked before anything is computed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar, get_args

from blockattn_rag.engine.fetcher import OnMiss
from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Assembly, Positions
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.blocks import Block, BlockPrompt

Prompt = BlockPrompt | Sequence["str | Block"]

_T = TypeVar("_T")
_SAMPLING_FIELDS = {field.name for field in fields(Sampling)} - {"extra"}


class Reuse(NamedTuple):
    """How blocks are reused, where a request does not say otherwise."""

    on_miss: OnMiss
    positions: Positions
    assembly: Assembly

    def checked(self) -> Reuse:
        """Itself, or ValueError for a word that is none of the expected ones."""
        one_of("on_miss", self.on_miss, OnMiss)
        one_of("positions", self.positions, Positions)
        one_of("assembly", self.assembly, Assembly)
        return self


class Request(NamedTuple):
    """A prompt and how it is to be answered. ``started``: seconds of ``time.perf_counter``."""

    prompt: BlockPrompt
    mode: Mode
    reuse: Reuse
    sampling: Sampling
    started: float

    @classmethod
    def parse(cls, prompt: Prompt, options: Mapping[str, Any], defaults: Reuse) -> Request:
        """Sort the keyword arguments of ``generate`` into what each part takes, and check them.

        Those that nothing here knows go to transformers' ``generate``.
        """
        started, rest = time.perf_counter(), dict(options)
        mode = one_of("mode", rest.pop("mode", "block"), Mode)
        own = {name: rest.pop(name, None) for name in Reuse._fields}
        given = {name: value for name, value in own.items() if value is not None}
        reuse = defaults._replace(**given)
        named = {name: rest.pop(name) for name in _SAMPLING_FIELDS & rest.keys()}
        stop = named.pop("stop", ()) or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(
            prompt if isinstance(prompt, BlockPrompt) else BlockPrompt.from_texts(prompt),
            mode,
            reuse.checked(),
            Sampling(**named, stop=stop, extra=rest),
            started,
        )


def one_of(name: str, value: _T, literal: Any) -> _T:
    """The value, if it is one of a ``Literal``'s; else ValueError."""
    if value not in get_args(literal):
        raise ValueError(f"{name} must be one of {', '.join(get_args(literal))}; found {value!r}")
    return value
