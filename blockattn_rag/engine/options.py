"""How a prompt is to be answered: checked once, before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from transformers import GenerationConfig, GenerationMixin

from blockattn_rag.attention.merge_file import load_merge
from blockattn_rag.engine.results import Mode
from blockattn_rag.engine.retry import FULL, NO_RETRY, PROMOTE, check_retry
from blockattn_rag.kv.context import Assembly, Positions
from blockattn_rag.model.correction_file import load_correction
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.prompts.promotion import NO_PROMOTION, check_promotion
from blockattn_rag.prompts.sinks import NO_SINK, check_sink
from blockattn_rag.structured.grammar import parse_grammar

OnMiss = Literal["compute", "error"]
"""``compute``: a block that is not in the store is encoded and stored. ``error``: ``MissError``."""

NO_CORRECTION = "none"
NO_MERGE = "none"
NO_READER = "none"

_WORDS = {"mode": Mode, "on_miss": OnMiss, "positions": Positions, "assembly": Assembly}
_SAMPLING = {one.name for one in fields(Sampling)} - {"extra", "grammar"}


class BlockOptions(TypedDict, total=False):
    """How block mode works. What is left out or None is the engine's own.

    The last five repair block mode on models that were not block-fine-tuned. In full mode they have
    no effect.

    on_miss: ``"compute"`` encodes and stores a block that is not in the store; ``"error"`` raises
        ``MissError``, for benchmarks.
    positions: ``"reordered"`` re-encodes positions; ``"composite"`` is the papers' ablation.
    assembly: ``"relay"`` attends to blocks where they lie, ``"copy"`` joins them in new tensors;
        ``"auto"`` takes relay where the model allows it.
    sink: what context blocks are encoded after: ``"none"``, ``"bos"``, ``"head:4"`` or
        ``"first-block"``; see ``prompts.sinks``. After another sink, a passage is another block.
    correction: file of a correction of keys and values, or ``"none"``; see ``model.correction``.
        Corrected passages are other blocks, too.
    merge: how attention to the passages is weighted against the rest: ``"none"``,
        ``"scale:0.95"``, ``"bias:-0.5"``, or the file of a learned merge; see
        ``attention.context_merge``.
    promote: passages that move to the final block: ``"none"``, a number, ``"last:1"`` or
        ``"attention:1"``; see ``prompts.promotion``.
    reader: folder of a reader adapter, or ``"none"``; see ``model.reader``.
    retry: how a question is answered again when block mode says that the passages do not hold the
        answer: ``"none"``, ``"full"`` or ``"promote:2"``; see ``engine.retry``. The beginning of a
        stream waits until it is clear.
    """

    on_miss: OnMiss | None
    positions: Positions | None
    assembly: Assembly | None
    sink: str | None
    correction: str | Path | None
    merge: str | None
    promote: str | int | None
    reader: str | Path | None
    retry: str | None


_BLOCK = tuple(BlockOptions.__annotations__)


def checked_option(name: str, value: Any) -> Any:
    """A block option as it is kept, such as ``"1"`` for ``promote=1``; None stays None.

    Raises as ``GenerateOptions``.
    """
    parsed = GenerateOptions.parse({name: value}, GenerateOptions())
    return None if value is None else getattr(parsed, name)


def check_names(options: Mapping[str, Any]) -> None:
    """Refuse what is no block option, where nothing else is taken.

    Raises:
        TypeError: there are other names.
    """
    if others := sorted(options.keys() - set(_BLOCK)):
        raise TypeError(f"unknown options {', '.join(others)}; known are {', '.join(_BLOCK)}")


def _check_spelling(name: str) -> None:
    """Refuse what is close to the name of an option, and no name that transformers has."""
    known = ("mode", *_BLOCK, *sorted(_SAMPLING), "response_format", "structured_outputs")
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

    See ``BlockOptions`` and ``Sampling``.

    Raises:
        ValueError: a word is none of the expected ones, or a number is out of range.
        FileNotFoundError: the reader's folder is not there.
    """

    mode: Mode = "block"
    on_miss: OnMiss = "compute"
    positions: Positions = "reordered"
    assembly: Assembly = "auto"
    sink: str = NO_SINK
    correction: str = NO_CORRECTION
    merge: str = NO_MERGE
    promote: str = NO_PROMOTION
    reader: str = NO_READER
    retry: str = NO_RETRY
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        check_sink(self.sink)
        load_merge(self.merge)
        check_retry(self.retry)
        object.__setattr__(self, "promote", check_promotion(self.promote))
        object.__setattr__(self, "reader", str(self.reader))
        object.__setattr__(self, "correction", str(self.correction))
        if self.correction != NO_CORRECTION:
            load_correction(self.correction)
        if self.reader != NO_READER and not Path(self.reader).expanduser().is_dir():
            raise FileNotFoundError(
                f"found no folder {self.reader!r}; expected that of a reader adapter, or 'none'"
            )
        for name, literal in _WORDS.items():
            known, found = get_args(literal), getattr(self, name)
            if found not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}; found {found!r}")

    @classmethod
    def parse(cls, given: Mapping[str, Any], defaults: GenerateOptions) -> GenerateOptions:
        """Sort the keyword arguments of ``generate``; None for a word means the default.

        Arguments of other names go to transformers' ``generate``, whose ``stop_strings`` are
        ``stop``: its own search starts in the prompt.

        Raises:
            TypeError: one of them is a name of ours, misspelt.
        """
        rest = dict(given)
        words = {name: rest.pop(name) for name in ("mode", *_BLOCK) if name in rest}
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

    def of_retry(self) -> GenerateOptions | None:
        """How to answer again when the answer is an abstention; None: not at all."""
        if self.mode == "full" or self.retry == NO_RETRY:
            return None
        if self.retry == FULL:
            return replace(self, mode="full", retry=NO_RETRY)
        promote = self.retry.removeprefix(PROMOTE)
        return replace(self, promote=promote, retry=NO_RETRY) if promote != self.promote else None

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
