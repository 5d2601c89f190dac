"""Settings of a fine-tuning run; the defaults are the papers'.

Each setting has its help text in the metadata of its field: the command line makes its options from
them. This file does not load torch, so that ``--help`` is fast.
"""
# ruff: noqa: RUF009  The functions called in the class return dataclasses.field.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from blockattn_rag.engine.results import Mode
from blockattn_rag.prompts.checkpoints import format_for
from blockattn_rag.prompts.sinks import NO_SINK, check_sink

if TYPE_CHECKING:
    from blockattn_rag.kv.context import Positions

T = TypeVar("T")
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
OnError = Literal["raise", "skip"]
Scheduler = Literal["linear", "cosine", "constant"]

# A resumed run may change these settings, because they do not change what is learned. Data files
# are compared by content.
_INCIDENTAL = (
    *("output", "train_data", "eval_data", "resume", "overwrite", "progress"),
    *("save_steps", "eval_steps"),
)


def _setting(
    panel: str | None, default: T, text: str, least: int | None = None, above: int | None = None
) -> T:
    """A field with its help text, its lower bound, and the panel of the help it belongs to."""
    bounds = {"least": least, "above": above}
    return field(default=default, metadata={"help": text, "panel": panel, **bounds})


_run = partial(_setting, None)
_learned = partial(_setting, "What is learned")
_optimizer = partial(_setting, "Optimizer and adapters")
_speed = partial(_setting, "Memory and speed")


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """One block fine-tuning run (Block-Attention, arXiv 2409.15355, section 2.4).

    Args:
        model: Path or hub id of the model to tune, or ``"bundled"``.
        output: Folder of the result; must not exist. It appears only when complete. Checkpoints are
            in ``<output>.work`` until then.
        train_data, eval_data: JSON-lines files; see :mod:`blockattn_rag.lab.training.data`.
        modes: ``("block", "full")`` trains every sample in both modes, as the paper does;
            ``("full",)`` is the baseline.
        positions: ``"composite"`` trains without position re-encoding (ablation).
        sink: Prefix tokens that context blocks are encoded with in block mode; see
            :mod:`blockattn_rag.prompts.sinks`. The engine must use the same.
        prompt_format: Format of records with passages: a name in ``prompts.FORMATS``, or ``"auto"``
            for a known checkpoint's own and ``"chat"`` for others.
        blocks_per_turn: Most blocks that a turn of ``messages`` is cut into. With 1, single-turn
            records have no context and are the same in both modes.
        on_error: ``"raise"`` stops at a bad line, ``"skip"`` trains on the rest and lists them.
        max_tokens: Longest sample. Default: the model's limit.
        epochs, max_steps: Length of the run; ``max_steps`` wins if given.
        batch_size: Samples in one mode per optimizer step, over all devices.
        per_device_batch_size: Samples of one forward pass on one device.
        lora: Train low-rank adapters instead of all weights (needs peft).
        dtype: Type of the trained weights; ``"auto"``: as stored. ``bf16`` computes in bfloat16 by
            autocast.
        eval_steps: Steps between evaluations. 0: only at the start and the end.
        resume: Continue from the last complete checkpoint of an interrupted run.
        overwrite: Replace an earlier result in ``output``, and discard an interrupted run.
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
        1, 'Most blocks that a turn of "messages" is cut into.', least=1
    )
    on_error: OnError = _run("raise", "At a bad line: raise stops, skip leaves it out.")
    max_tokens: int | None = _run(None, "Longest sample.", least=1)
    epochs: float = _run(1.0, "Passes over the data.", above=0)
    max_steps: int | None = _run(None, "Optimizer steps, instead of epochs.", least=1)
    learning_rate: float = _run(2e-5, "Peak learning rate.", above=0)
    lr_scheduler: Scheduler = _optimizer("linear", "linear, cosine, constant.")
    batch_size: int = _run(64, "Samples of an optimizer step.", least=1)
    per_device_batch_size: int = _speed(1, "Samples of a forward pass.", least=1)
    warmup_steps: int = _optimizer(20, "Steps in which the learning rate rises.", least=0)
    adam_beta2: float = _optimizer(0.999, "Decay of Adam's second moment.", least=0)
    lora: bool = _optimizer(False, "Train low-rank adapters instead of all weights.")
    lora_rank: int = _optimizer(16, "Rank of the adapters.", least=1)
    dtype: Dtype = _speed("float32", "Type of the weights.")
    bf16: bool = _speed(False, "Compute in bfloat16.")
    gradient_checkpointing: bool = _speed(False, "Recompute activations, to save memory.")
    seed: int = _run(0, "Random seed.", least=0)
    eval_steps: int = _run(0, "Steps between evaluations; 0: at start and end.", least=0)
    save_steps: int = _run(200, "Steps between checkpoints.", least=1)
    resume: bool = _run(False, "Continue an interrupted run.")
    overwrite: bool = _run(False, "Replace an earlier result.")
    progress: bool = _run(True, "Show progress.")

    def __post_init__(self) -> None:
        if not self.train_data or isinstance(self.train_data, (str, Path)):
            raise ValueError(f"train_data must be a list of files, found {self.train_data!r}")
        distinct = set(self.modes)
        if not distinct or len(distinct) < len(self.modes) or not distinct <= set(get_args(Mode)):
            raise ValueError(f"modes must be distinct, of {get_args(Mode)}, found {self.modes!r}")
        for name, choices in _choices().items():
            if (found := getattr(self, name)) not in choices:
                raise ValueError(f"{name} must be of {choices}, found {found!r}")
        for setting in fields(self):
            _check_bounds(setting.name, getattr(self, setting.name), setting.metadata)
        if self.adam_beta2 >= 1 or self.seed >= 2**32:  # numpy takes no larger seed
            raise ValueError(
                f"found adam_beta2 {self.adam_beta2} and seed {self.seed}, expected adam_beta2 "
                "below 1 and seed below 4294967296"
            )
        if check_sink(self.sink) != NO_SINK and "block" not in self.modes:
            raise ValueError(f"sink is {self.sink!r}, but modes has no 'block', which it is for")
        chosen = format_for(self.prompt_format, self.model).name
        object.__setattr__(self, "prompt_format", chosen)  # what a run notes and is resumed with
        if not Path(self.output).name.strip("."):
            raise ValueError(f"output must name a folder, found {str(self.output)!r}")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")

    @property
    def marker(self) -> dict[str, object]:
        """Entry in the model's config that says how it was block-fine-tuned."""
        how = {"positions": self.positions, "sink": self.sink}
        return {"version": 1, "modes": list(self.modes), **how}

    def decisive(self) -> dict[str, object]:
        """The settings that decide the result."""
        return {k: v for k, v in asdict(self).items() if k not in _INCIDENTAL}


def _check_bounds(name: str, found: Any, metadata: Any) -> None:
    """Raises ``ValueError`` unless a number is None, or finite and in its bounds."""
    least, above = metadata.get("least"), metadata.get("above")
    if found is None or least is above is None:
        return
    fits = math.isfinite(found) and (found > above if least is None else found >= least)
    if not fits:
        expected = f"above {above}" if least is None else f"{least} or more"
        raise ValueError(f"{name} is {found}, expected {expected}")


def _choices() -> dict[str, tuple[str, ...]]:
    """The values of each setting of a ``Literal`` type."""
    from blockattn_rag.kv.context import Positions  # loads torch

    hints = get_type_hints(FinetuneConfig, localns={"Positions": Positions})
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
