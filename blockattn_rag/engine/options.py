"""How a prompt is to be answered: checked once, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import signature
from typing import Any, Literal, get_args

from transformers import GenerationConfig, GenerationMixin

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Assembly
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.output.grammar import parse_grammar

OnMiss = Literal["compute", "error"]
"""``compute``: a block that is not in the store is encoded and stored. ``error``: ``MissError``."""

_WORDS = {"mode": Mode, "on_miss": OnMiss, "assembly": Assembly}
_NAMES = (*_WORDS, "recipe")
_SAMPLING = {one.name for one in fields(Sampling)} - {"extra", "grammar"}


def _check_spelling(name: str) -> None:
    """Refuse what is close to the name of an option, and no name that transformers has."""
    known = (*_NAMES, *sorted(_SAMPLING), "response_format", "structured_outputs")
    near = get_close_matches(name, known, n=1, cutoff=0.87)
    if not near or name in signature(GenerationMixin.generate).parameters:
        return
    if not hasattr(GenerationConfig(), name):  # type: ignore[no-untyped-call]
        raise TypeError(f"unknown option {name!r} (did you mean {near[0]!r}?)")


def _texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if given and isinstance(given, str) else tuple(given or ())


@dataclass(frozen=True, slots=True, eq=False)
class GenerateOptions:
    """The options of one request. Requests with equal options may share a batch.

    Args:
        mode: ``"block"`` reuses blocks; ``"full"`` is ordinary attention over the same tokens.
        on_miss: ``"compute"`` encodes and stores a block that is not in the store; ``"error"``
            raises ``MissError``, for benchmarks.
        assembly: ``"relay"`` attends to blocks where they lie, ``"copy"`` joins them in new
            tensors; ``"auto"`` takes relay where the model allows it.
        recipe: How the model runs in block mode. No effect in full mode.
        sampling: How tokens are chosen.

    Raises:
        ValueError: a word is none of the expected ones, or a number is out of range.
    """

    mode: Mode = "block"
    on_miss: OnMiss = "compute"
    assembly: Assembly = "auto"
    recipe: Recipe = field(default_factory=Recipe)
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        for name, literal in _WORDS.items():
            known, found = get_args(literal), getattr(self, name)
            if found not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; found {found!r}")

    @classmethod
    def parse(cls, given: Mapping[str, Any], defaults: GenerateOptions) -> GenerateOptions:
        """Sort the keyword arguments of ``generate``; None for a word means the default.

        Arguments of other names go to transformers' ``generate``, whose ``stop_strings`` are
        ``stop``: its own search starts in the prompt. A ``recipe`` must be resolved.

        Raises:
            TypeError: one of them is a name of ours, misspelt.
        """
        rest = dict(given)
        words = {name: rest.pop(name) for name in _NAMES if name in rest}
        named = {name: rest.pop(name) for name in _SAMPLING & rest.keys()}
        asked = (rest.pop("response_format", None), rest.pop("structured_outputs", None))
        for name in rest:
            _check_spelling(name)
        stop = (*_texts(named.pop("stop", None)), *_texts(rest.pop("stop_strings", None)))
        if "stop_strings" in given:  # transformers needs the tokenizer for these alone
            rest.pop("tokenizer", None)
        keep = tuple(named.pop("keep_tokens", ()) or ())
        return replace(
            defaults,
            **{name: word for name, word in words.items() if word is not None},
            sampling=Sampling(
                **named,
                stop=stop,
                keep_tokens=keep,
                extra=rest,
                grammar=parse_grammar(*asked),
            ),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerateOptions):
            return NotImplemented
        if self is other:
            return True
        try:
            return all(
                bool(getattr(self, one.name) == getattr(other, one.name)) for one in fields(self)
            )
        except Exception:  # noqa: BLE001 -- tensors, say, have no single truth
            return False

    __hash__ = None  # type: ignore[assignment]  # because of `Sampling.extra`, a dict
