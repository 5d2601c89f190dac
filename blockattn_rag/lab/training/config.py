"""Settings of a fine-tuning run, with the papers' defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Positions
from blockattn_rag.prompts.checkpoints import format_for
from blockattn_rag.prompts.sinks import NO_SINK, check_sink

LearningRateSchedule = Literal["linear", "cosine", "constant"]

# These settings may change when a run is resumed, because they do not affect the result. Data files
# are compared by content.
_INCIDENTAL = ("output", "train_data", "eval_data", "progress", "save_steps", "eval_steps")

# Minimum values of numeric settings.
_LEAST = {
    **dict.fromkeys(("warmup_steps", "adam_beta2", "seed", "eval_steps"), 0),
    **dict.fromkeys(("blocks_per_turn", "max_steps", "batch_size"), 1),
    **dict.fromkeys(("per_device_batch_size", "save_steps", "lora_rank"), 1),
}


@dataclass(frozen=True, slots=True)
class FinetuneConfig:
    """Settings of a block fine-tuning run (Block-Attention, arXiv 2409.15355, section 2.4).

    Args:
        model: Path or hub id of the model to tune, or ``"bundled"``.
        output: Folder for the result. It must not exist, and is created when the run is complete.
            Until then, checkpoints are in ``<output>.work``, from which an interrupted run with the
            same settings resumes.
        train_data, eval_data: JSON Lines files; see :mod:`blockattn_rag.lab.training.data`.
        modes: ``("block", "full")`` trains each sample in both modes, as in the paper;
            ``("full",)`` is the baseline.
        positions: ``"composite"`` trains without position re-encoding (ablation).
        sink: Prefix tokens that context blocks are encoded with in block mode; see
            :mod:`blockattn_rag.prompts.sinks`. The engine must use the same sink.
        prompt_format: Format of records with passages: a name in ``prompts.FORMATS``, or ``"auto"``
            for the format of a known checkpoint and ``"chat"`` for other models.
        blocks_per_turn: Maximum number of blocks that a turn of ``messages`` is split into. With 1,
            single-turn records have no context and are identical in both modes.
        epochs, max_steps: Length of the run. ``max_steps`` overrides ``epochs``.
        batch_size: Training items (samples in one mode) per optimizer step, over all devices.
        per_device_batch_size: Training items per forward pass on a device.
        lora: Whether to train low-rank adapters instead of all weights (needs peft).
        lora_rank: Rank of the adapters. The scale is always 2.
        bf16: Whether to compute in bfloat16 with autocast. The weights are float32.
        eval_steps, save_steps: Steps between evaluations and between checkpoints. With 0,
            evaluations are only at the start and end.

    Raises:
        ValueError: A setting is unknown or out of range, or settings contradict each other.
    """

    model: str
    output: str | Path
    train_data: Sequence[str | Path]
    eval_data: Sequence[str | Path] = ()
    modes: tuple[Mode, ...] = ("block", "full")
    positions: Positions = "reordered"
    sink: str = NO_SINK
    prompt_format: str = "auto"
    blocks_per_turn: int = 1
    epochs: float = 1.0
    max_steps: int | None = None
    learning_rate: float = 2e-5
    lr_scheduler: LearningRateSchedule = "linear"
    batch_size: int = 64
    per_device_batch_size: int = 1
    warmup_steps: int = 20
    adam_beta2: float = 0.999
    lora: bool = False
    lora_rank: int = 16
    bf16: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0
    eval_steps: int = 0
    save_steps: int = 200
    progress: bool = True

    def __post_init__(self) -> None:
        if not self.train_data or isinstance(self.train_data, (str, Path)):
            raise ValueError(f"Invalid train_data {self.train_data!r}: expected a list of files")
        distinct = set(self.modes)
        if not distinct or len(distinct) < len(self.modes) or not distinct <= set(get_args(Mode)):
            raise ValueError(
                f"Invalid modes {self.modes!r}: expected distinct values from {get_args(Mode)}"
            )
        for name, hint in get_type_hints(FinetuneConfig).items():
            choices = get_args(hint) if get_origin(hint) is Literal else ()
            if choices and (value := getattr(self, name)) not in choices:
                raise ValueError(f"Unknown {name} {value!r}: expected one of {choices}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value < math.inf:
                raise ValueError(f"Invalid {name} {value}: expected {least} or more")
        for name in ("epochs", "learning_rate"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"Invalid {name} {value}: expected more than 0")
        if self.adam_beta2 >= 1 or self.seed >= 2**32:  # Limit of numpy's seeds.
            raise ValueError(
                f"Invalid adam_beta2 {self.adam_beta2} or seed {self.seed}: expected adam_beta2 "
                "below 1 and seed below 4294967296"
            )
        if check_sink(self.sink) != NO_SINK and "block" not in self.modes:
            raise ValueError(
                f"The sink {self.sink!r} requires block mode: add 'block' to modes, or omit sink"
            )
        chosen = format_for(self.prompt_format, self.model).name
        object.__setattr__(self, "prompt_format", chosen)  # Saved for resuming.
        if not Path(self.output).name.strip("."):
            raise ValueError(f"Invalid output {str(self.output)!r}: expected the name of a folder")

    @property
    def marker(self) -> dict[str, object]:
        """Config entry that marks the model as block-fine-tuned."""
        how = {"positions": self.positions, "sink": self.sink}
        return {"version": 1, "modes": list(self.modes), **how}

    def decisive(self) -> dict[str, object]:
        return {k: v for k, v in asdict(self).items() if k not in _INCIDENTAL}
