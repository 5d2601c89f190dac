"""How a prompt is to be answered: checked once, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Assembly, Positions
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.sinks import NO_SINK, check_sink

OnMiss = Literal["compute", "error"]
"""``compute``: a block that is not in the store is encoded and stored. ``error``: ``MissError``."""

_WORDS = {"mode": Mode, "on_miss": OnMiss, "positions": Positions, "assembly": Assembly}
_SAMPLING = {one.name for one in fields(Sampling)} - {"extra"}


@dataclass(frozen=True, slots=True, eq=False)
class GenerateOptions:
    """The options of one request. Requests with equal options may share a batch.

    Raises:
        ValueError: a word is none of the expected ones, or a number is out of range.
    """

    mode: Mode = "block"
    on_miss: OnMiss = "compute"
    positions: Positions = "reordered"
    assembly: Assembly = "auto"
    sink: str = NO_SINK
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_sink(self.sink)
        for name, literal in _WORDS.items():
            known, found = get_args(literal), getattr(self, name)
            if found not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; found {found!r}")

    @classmethod
    def parse(cls, given: Mapping[str, Any], defaults: GenerateOptions) -> GenerateOptions:
        """Sort the keyword arguments of ``generate``; None for a word means the default.

        Arguments of other names go to transformers' ``generate``.
        """
        rest = dict(given)
        words = {name: rest.pop(name) for name in (*_WORDS, "sink") if name in rest}
        named = {name: rest.pop(name) for name in _SAMPLING & rest.keys()}
        stop = named.pop("stop", ()) or ()
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        return replace(
            defaults,
            **{name: word for name, word in words.items() if word is not None},
            sampling=Sampling(**named, stop=stop, extra=rest),
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
