"""Settings of a fine-tuning run; the defaults are the papers'.

Each setting has its help text, and a number its range, in the metadata of its field: the command
line makes its options from them. No torch here, because ``--help`` must not load it.
"""
# ruff: noqa: RUF009  The functions called in the classes return dataclasses.field.

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from blockattn_rag.engine.results import Mode
from blockattn_rag.prompts.checkpoints import format_for
from blockattn_rag.prompts.sinks import NO_SINK, check_sink

if TYPE_CHECKING:
    from blockattn_rag.kv.context import Positions

T = TypeVar("T")
Attention = Literal["auto", "eager", "sdpa", "flex_attention"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
OnError = Literal["raise", "skip"]
Scheduler = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup",
    "inverse_sqrt",
]  # fmt: skip

# These settings do not change what is learned, so a resumed run may have other values of them.
# Data files are compared by content.
_INCIDENTAL = (
    *("output", "train_data", "eval_data", "resume", "overwrite", "progress"),
    *("logging_steps", "save_steps", "eval_steps", "keep_checkpoints"),
)


class Range(NamedTuple):
    """What a number may be: in words, as a check, and the ``min`` and ``max`` of its option."""

    words: str
    fits: Callable[[float], bool]
    bounds: Mapping[str, int] = {}


_COUNT = Range("1 or more", lambda found: found >= 1, {"min": 1})
_ABOVE_0 = Range("above 0", lambda found: found > 0)
_FROM_0 = Range("0 or more", lambda found: found >= 0, {"min": 0})
_BELOW_1 = Range("0 to below 1", lambda found: 0 <= found < 1, {"min": 0, "max": 1})
_SHARE = Range("0 to 1", lambda found: 0 <= found <= 1, {"min": 0, "max": 1})
_SEED = Range("0 to 4294967295", lambda found: 0 <= found < 2**32)  # what numpy takes as a seed


def _check_numbers(settings: LoraConfig | FinetuneConfig, owner: str = "") -> None:
    """Raises ``ValueError`` unless each number is None, or finite and in its range."""
    for setting in fields(settings):
        found, range_ = getattr(settings, setting.name), setting.metadata.get("range")
        if found is not None and range_ and not (math.isfinite(found) and range_.fits(found)):
            raise ValueError(f"{owner}{setting.name} is {found}, expected {range_.words}")


def _setting(panel: str | None, default: T, text: str, range_: Range | None = None) -> T:
    """A field with the help text of its setting, its range, and the panel of the help it is in."""
    return field(default=default, metadata={"help": text, "range": range_, "panel": panel})


_run = partial(_setting, None)
_learned = partial(_setting, "What is learned")
_optimizer = partial(_setting, "Optimizer and adapters")
_speed = partial(_setting, "Memory and speed")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters instead of all weights (needs peft).

    ``target_modules``: names of the layers that get adapters, or ``"all-linear"``.
    """

    rank: int = _optimizer(16, "Of the adapters; 16.", _COUNT)
    alpha: int = _optimizer(32, "Of the adapters; twice the rank.", _COUNT)
    dropout: float = _optimizer(0.0, "Of the adapters; 0.", _BELOW_1)
    target_modules: str | tuple[str, ...] = _optimizer(
        "all-linear", "Layers with adapters; repeatable; all-linear."
    )

    def __post_init__(self) -> None:
        _check_numbers(self, "the adapters' ")
        if not isinstance(self.target_modules, str) and "all-linear" in self.target_modules:
            raise ValueError("'all-linear' stands for all layers; found it among names of layers")


def work_of(output: Path) -> Path:
    """The folder of a run's checkpoints and encoded data, beside its result."""
    return output.with_name(output.name + ".work")


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """One block fine-tuning run (Block-Attention, arXiv 2409.15355, section 2.4).

    Args:
        model: path or hub id of the model to tune; ``"bundled"`` works too.
        output: folder of the result; must not exist. It appears only when complete. Checkpoints
            lie beside it in ``<output>.work``.
        train_data, eval_data: JSON-lines files, see :mod:`blockattn_rag.lab.training.data`.
        modes: ``("block", "full")`` trains every sample in both, as the paper does;
            ``("full",)`` is the baseline.
        positions: ``"composite"`` leaves position re-encoding out (ablation).
        sink: what context blocks are encoded after in block mode; the engine must then be given
            the same. See :mod:`blockattn_rag.prompts.sinks`.
        prompt_format: of records with passages; a name of ``prompts.FORMATS``, or ``"auto"`` for
            the model's own if it is a known checkpoint and ``"chat"`` elsewhere.
        blocks_per_turn: of records with messages: into how many blocks a turn may be cut. 1 keeps
            turns whole; then single-turn records have no context and are alike in both modes.
        on_error: ``"raise"`` stops at a bad line, ``"skip"`` trains on the rest and lists them.
        max_tokens: longest sample; None for the model's own limit.
        context_loss_weight: weight of all other tokens beside 1 for answers; 0 learns answers
            only, 1 learns all alike.
        epochs, max_steps: how long; ``max_steps`` wins if given.
        learning_rate, batch_size, warmup_steps: the papers'. ``batch_size`` counts samples in one
            mode, over all devices, per optimizer step.
        per_device_batch_size: samples of one forward pass on one device.
        packing: see ``batches.Collator``; best with ``attention="flex_attention"``.
        group_by_length: batches of samples of about one length.
        attention: ``"auto"`` is FlexAttention on CUDA, or SDPA for models that lack it, and eager
            elsewhere.
        dtype: of the weights that are trained, ``"auto"`` as they are stored; ``bf16`` computes in
            bfloat16 by autocast.
        eval_steps: evaluate that often, and at the start and end; 0 for start and end alone.
        resume: go on from the last complete checkpoint of an interrupted run.
        overwrite: replace an earlier result in ``output``, and throw an interrupted run away.
    """

    model: str
    output: str | Path = field(metadata={"help": "Folder of the result; appears when complete."})
    train_data: Sequence[str | Path] = field(
        metadata={"help": "Training data, JSON lines; may be repeated."}
    )
    eval_data: Sequence[str | Path] = _run((), "Data to evaluate on; may be repeated.")
    modes: tuple[Mode, ...] = _learned(
        ("block", "full"), "block,full (the papers'), block or full."
    )
    positions: Positions = _learned("reordered", "reordered, or composite (ablation).")
    sink: str = _learned(NO_SINK, "Prefix tokens that blocks are encoded with: none, bos, head:N.")
    prompt_format: str = _learned(
        "auto", "auto (a known checkpoint's own, else chat), chat, block-attention, turborag, ..."
    )
    blocks_per_turn: int = _learned(
        1, 'Of lines with "messages": most blocks of a turn; 1 keeps turns whole.', _COUNT
    )
    on_error: OnError = _run("raise", "Stop at a bad line, or leave it out.")
    max_tokens: int | None = _run(None, "Longest sample.", _COUNT)
    context_loss_weight: float = _learned(0.0, "Loss weight of all but the answers.", _SHARE)
    epochs: float = _run(1.0, "Passes over the data.", _ABOVE_0)
    max_steps: int | None = _run(None, "Instead of epochs.", _COUNT)
    learning_rate: float = _run(2e-5, "Peak learning rate.", _ABOVE_0)
    lr_scheduler: Scheduler = _optimizer("linear", "linear, cosine, constant, ...")
    batch_size: int = _run(64, "Samples of an optimizer step.", _COUNT)
    per_device_batch_size: int = _speed(1, "Samples of one forward pass.", _COUNT)
    warmup_steps: int = _optimizer(20, "Steps of rising learning rate.", _FROM_0)
    weight_decay: float = _optimizer(0.0, "", _FROM_0)
    adam_beta2: float = _optimizer(0.999, "", _BELOW_1)
    max_grad_norm: float = _optimizer(1.0, "Longer gradients are cut.", _FROM_0)
    lora: LoraConfig | None = _optimizer(None, "Train low-rank adapters, not all weights.")
    packing: bool = _speed(False, "Several samples a row.")
    group_by_length: bool = _speed(True, "Batches of samples of about one length.")
    attention: Attention = _speed("auto", "auto, eager, sdpa, flex_attention.")
    dtype: Dtype = _speed("float32", "Of the weights.")
    bf16: bool = _speed(False, "Compute in bfloat16.")
    gradient_checkpointing: bool = _speed(False, "Trade time for memory.")
    seed: int = _run(0, "Of all that is random.", _SEED)
    eval_steps: int = _run(0, "Evaluate that often; 0: at start and end.", _FROM_0)
    logging_steps: int = _run(10, "Steps between reports of loss.", _COUNT)
    save_steps: int = _run(200, "Steps between checkpoints.", _COUNT)
    keep_checkpoints: bool = _run(False, "Leave them in OUTPUT.work at the end.")
    resume: bool = _run(False, "Go on with an interrupted run.")
    overwrite: bool = _run(False, "Replace an earlier result.")
    progress: bool = _run(True, "Show how far it is.")

    def __post_init__(self) -> None:
        if not self.train_data or isinstance(self.train_data, (str, Path)):
            raise ValueError(f"train_data must be a list of files, found {self.train_data!r}")
        distinct = set(self.modes)
        if not distinct or len(distinct) < len(self.modes) or not distinct <= set(get_args(Mode)):
            raise ValueError(f"modes must be distinct, of {get_args(Mode)}, found {self.modes!r}")
        for name, choices in _choices().items():
            if (found := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be of {choices}, found {found!r}")
        _check_numbers(self)
        if check_sink(self.sink) != NO_SINK and "block" not in self.modes:
            raise ValueError(f"sink is {self.sink!r}, but modes has no 'block', which it is for")
        chosen = format_for(self.prompt_format, self.model).name
        object.__setattr__(self, "prompt_format", chosen)  # what a run notes and is resumed with
        if not Path(self.output).name.strip("."):
            raise ValueError(f"output must name a folder, found {str(self.output)!r}")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")

    @property
    def work(self) -> Path:
        """Where checkpoints and encoded data lie while the run lasts."""
        return work_of(Path(self.output))

    @property
    def marker(self) -> dict[str, object]:
        """What is written into the model's config: how it was block fine-tuned."""
        how = {"positions": self.positions, "sink": self.sink}
        return {"version": 1, "modes": list(self.modes), **how}

    def decisive(self) -> dict[str, object]:
        """The settings that decide the result."""
        return {k: v for k, v in asdict(self).items() if k not in _INCIDENTAL}


def _choices() -> dict[str, tuple[str, ...]]:
    """The words that a setting may be, for each setting of a ``Literal`` type."""
    from blockattn_rag.kv.context import Positions  # loads torch

    hints = get_type_hints(FinetuneConfig, localns={"Positions": Positions})
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
