"""Options for one request, which are validated before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, get_args

from transformers import GenerationConfig, GenerationMixin

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Mode
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.output.grammar import parse_grammar

_SAMPLING = {field.name for field in fields(Sampling)} - {"extra", "grammar"}
_KNOWN = ("mode", "recipe", *sorted(_SAMPLING), "response_format", "structured_outputs")
_OF_THE_ENGINE = ("on_miss", "assembly", "positions")


@dataclass(frozen=True, slots=True, eq=False)
class GenerateOptions:
    """Options for one request. Requests with equal options may share a batch."""

    mode: Mode = "block"
    recipe: Recipe = field(default_factory=Recipe)  # Ignored in full mode.
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            known = " or ".join(map(repr, get_args(Mode)))
            raise ValueError(f"Unknown mode {self.mode!r}: expected {known}.")

    @classmethod
    def parse(cls, given: Mapping[str, Any], recipe: Recipe) -> GenerateOptions:
        """Parse the keyword arguments of ``generate``. ``recipe``: The resolved recipe.

        Unknown arguments are passed to transformers' ``generate``, except engine settings and
        misspelled options, which raise ``TypeError``. ``stop_strings`` is handled as ``stop``,
        because transformers would also search the prompt for these strings.
        """
        rest = dict(given)
        rest.pop("recipe", None)
        mode = rest.pop("mode", None)
        named = {name: rest.pop(name) for name in _SAMPLING & rest.keys()}
        grammar = parse_grammar(
            rest.pop("response_format", None), rest.pop("structured_outputs", None)
        )
        for name in rest:
            _check_name(name)
        stop = (*_texts(named.pop("stop", None)), *_texts(rest.pop("stop_strings", None)))
        if "stop_strings" in given:  # Transformers only needs the tokenizer for stop_strings.
            rest.pop("tokenizer", None)
        return cls(
            mode="block" if mode is None else mode,
            recipe=recipe,
            sampling=Sampling(**named, stop=stop, extra=rest, grammar=grammar),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GenerateOptions):
            return NotImplemented
        mine = (self.mode, self.recipe, self.sampling)
        try:
            return self is other or mine == (other.mode, other.recipe, other.sampling)
        except Exception:  # noqa: BLE001 -- options may be arrays, which have no truth value
            return False

    __hash__ = None  # type: ignore[assignment]  # `Sampling.extra` is a dict


def _check_name(name: str) -> None:
    """Reject engine settings and misspelled options."""
    if name in _OF_THE_ENGINE:
        raise TypeError(
            f"{name!r} is a setting of the engine, not of a call: pass it to the constructor, "
            f"BlockAttentionEngine(model, store, {name}=...)."
        )
    near = get_close_matches(name, _KNOWN, n=1, cutoff=0.87)
    if not near or name in signature(GenerationMixin.generate).parameters:
        return
    if not hasattr(GenerationConfig(), name):  # type: ignore[no-untyped-call]
        raise TypeError(f"Unknown option {name!r}: did you mean {near[0]!r}?")


def _texts(given: str | Sequence[str] | None) -> tuple[str, ...]:
    return (given,) if given and isinstance(given, str) else tuple(given or ())
