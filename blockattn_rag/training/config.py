"""Settings of a fine-tuning run; the defaults are the papers'."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from blockattn_rag.training.batches import Mode
from blockattn_rag.training.data import OnError
from blockattn_rag.training.masks import Positions

Attention = Literal["auto", "eager", "sdpa", "flex_attention"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]

_CHOICES: dict[str, Any] = {
    "positions": Positions,
    "attention": Attention,
    "on_error": OnError,
    "lr_scheduler": Scheduler,
    "dtype": Dtype,
}

# Changing these does not change what is learned, so an interrupted run may go on with others.
# Data files are compared by content.
_INCIDENTAL = (
    *("output", "train_data", "eval_data", "resume", "overwrite", "progress"),
    *("logging_steps", "save_steps", "eval_steps", "keep_checkpoints"),
)


_COUNT, _ABOVE_0, _FROM_0 = "1 or more", "above 0", "0 or more"
_FITS: dict[str, Callable[[float], bool]] = {
    _COUNT: lambda found: found >= 1,
    _ABOVE_0: lambda found: found > 0,
    _FROM_0: lambda found: found >= 0,
    "0 to below 1": lambda found: 0 <= found < 1,
    "0 to 1": lambda found: 0 <= found <= 1,
    "0 to 4294967295": lambda found: 0 <= found < 2**32,  # what numpy takes as a seed
}
_NUMBERS = {
    **dict.fromkeys(("blocks_per_turn", "max_tokens", "max_steps", "batch_size"), _COUNT),
    **dict.fromkeys(("per_device_batch_size", "logging_steps", "save_steps"), _COUNT),
    **dict.fromkeys(("epochs", "learning_rate"), _ABOVE_0),
    **dict.fromkeys(("warmup_steps", "weight_decay", "max_grad_norm"), _FROM_0),
    "eval_steps": _FROM_0,
    "seed": "0 to 4294967295",
    "adam_beta2": "0 to below 1",
    "context_loss_weight": "0 to 1",
}
_LORA_NUMBERS = {"rank": _COUNT, "alpha": _COUNT, "dropout": "0 to below 1"}


def _check_number(name: str, found: float | None, expected: str) -> None:
    """Raises ``ValueError`` unless ``found`` is None, or finite and as ``expected`` says."""
    if found is not None and not (math.isfinite(found) and _FITS[expected](found)):
        raise ValueError(f"{name} is {found}, expected {expected}")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters instead of all weights (needs peft).

    Args:
        rank, alpha, dropout: of the adapters.
        target_modules: names of the layers, or ``"all-linear"``.
    """

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"

    def __post_init__(self) -> None:
        for name, expected in _LORA_NUMBERS.items():
            _check_number(f"the adapters' {name}", getattr(self, name), expected)
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
        train_data, eval_data: JSON-lines files, see :mod:`blockattn_rag.training.data`.
        modes: ``("block", "full")`` trains every sample in both, as the paper does;
            ``("full",)`` is the baseline.
        positions: ``"composite"`` leaves position re-encoding out (ablation).
        prompt_format: of records with passages: ``"chat"``, ``"block-attention"``, ``"turborag"``.
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
    output: str | Path
    train_data: Sequence[str | Path]
    eval_data: Sequence[str | Path] = ()
    modes: tuple[Mode, ...] = ("block", "full")
    positions: Positions = "reordered"
    prompt_format: str = "chat"
    blocks_per_turn: int = 1
    on_error: OnError = "raise"
    max_tokens: int | None = None
    context_loss_weight: float = 0.0
    epochs: float = 1.0
    max_steps: int | None = None
    learning_rate: float = 2e-5
    lr_scheduler: Scheduler = "linear"
    batch_size: int = 64
    per_device_batch_size: int = 1
    warmup_steps: int = 20
    weight_decay: float = 0.0
    adam_beta2: float = 0.999
    max_grad_norm: float = 1.0
    lora: LoraConfig | None = None
    packing: bool = False
    group_by_length: bool = True
    attention: Attention = "auto"
    dtype: Dtype = "float32"
    bf16: bool = False
    gradient_checkpointing: bool = False
    seed: int = 0
    eval_steps: int = 0
    logging_steps: int = 10
    save_steps: int = 200
    keep_checkpoints: bool = False
    resume: bool = False
    overwrite: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        if not self.train_data or isinstance(self.train_data, (str, Path)):
            raise ValueError(f"train_data must be a list of files, found {self.train_data!r}")
        distinct = set(self.modes)
        if not distinct or len(distinct) < len(self.modes) or not distinct <= set(get_args(Mode)):
            raise ValueError(f"modes must be distinct, of {get_args(Mode)}, found {self.modes!r}")
        for name, choices in _CHOICES.items():
            if (found := getattr(self, name)) not in get_args(choices):
                raise ValueError(f"{name} must be of {get_args(choices)}, found {found!r}")
        for name, expected in _NUMBERS.items():
            _check_number(name, getattr(self, name), expected)
        if not Path(self.output).name.strip("."):
            raise ValueError(f"output must name a folder, found {str(self.output)!r}")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")

    @property
    def work(self) -> Path:
        """Where checkpoints and encoded data lie while the run lasts."""
        return work_of(Path(self.output))

    @property
    def marker(self) -> dict[str, Any]:
        """What is written into the model's config: how it was block fine-tuned."""
        return {"version": 1, "modes": list(self.modes), "positions": self.positions}

    def decisive(self) -> dict[str, Any]:
        """The settings that decide the result."""
        settings = dataclasses.asdict(self)
        return {k: v for k, v in settings.items() if k not in _INCIDENTAL}
