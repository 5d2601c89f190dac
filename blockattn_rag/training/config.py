"""Settings of a fine-tuning run; the defaults are the papers'.

Each setting has its help text, and a number its range, in the metadata of its field: the command
line makes its options from them. No torch here, because ``--help`` must not load it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from blockattn_rag.engine.results import Mode

if TYPE_CHECKING:
    from blockattn_rag.kv.context import Positions

Attention = Literal["auto", "eager", "sdpa", "flex_attention"]
Dtype = Literal["auto", "float32", "bfloat16", "float16", "float64"]
OnError = Literal["raise", "skip"]
Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
]

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
    for setting in dataclasses.fields(settings):
        found, range_ = getattr(settings, setting.name), setting.metadata.get("range")
        if found is None or range_ is None:
            continue
        if not (math.isfinite(found) and range_.fits(found)):
            raise ValueError(f"{owner}{setting.name} is {found}, expected {range_.words}")


def _about(panel: str | None, text: str, range_: Range | None = None) -> dict[str, Any]:
    """Metadata of a setting: its help text, the panel of the help to show it in, and its range."""
    return {"help": text, "panel": panel, "range": range_}


_run = partial(_about, None)
_learned = partial(_about, "What is learned")
_optimizer = partial(_about, "Optimizer and adapters")
_speed = partial(_about, "Memory and speed")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters instead of all weights (needs peft).

    Args:
        rank, alpha, dropout: of the adapters.
        target_modules: names of the layers, or ``"all-linear"``.
    """

    rank: int = field(default=16, metadata=_optimizer("Of the adapters; 16.", _COUNT))
    alpha: int = field(default=32, metadata=_optimizer("Of the adapters; twice the rank.", _COUNT))
    dropout: float = field(default=0.0, metadata=_optimizer("Of the adapters; 0.", _BELOW_1))
    target_modules: str | tuple[str, ...] = field(
        default="all-linear", metadata=_optimizer("Layers with adapters; repeatable; all-linear.")
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
    output: str | Path = field(metadata=_run("Folder of the result; appears when complete."))
    train_data: Sequence[str | Path] = field(
        metadata=_run("Training data, JSON lines; may be repeated.")
    )
    eval_data: Sequence[str | Path] = field(
        default=(), metadata=_run("Data to evaluate on; may be repeated.")
    )
    modes: tuple[Mode, ...] = field(
        default=("block", "full"), metadata=_learned("block,full (the papers'), block or full.")
    )
    positions: Positions = field(
        default="reordered", metadata=_learned("reordered, or composite (ablation).")
    )
    prompt_format: str = field(
        default="chat", metadata=_learned("chat, block-attention or turborag.")
    )
    blocks_per_turn: int = field(
        default=1,
        metadata=_learned(
            'Of lines with "messages": most blocks of a turn; 1 keeps turns whole.', _COUNT
        ),
    )
    on_error: OnError = field(
        default="raise", metadata=_run("Stop at a bad line, or leave it out.")
    )
    max_tokens: int | None = field(default=None, metadata=_run("Longest sample.", _COUNT))
    context_loss_weight: float = field(
        default=0.0, metadata=_learned("Loss weight of all but the answers.", _SHARE)
    )
    epochs: float = field(default=1.0, metadata=_run("Passes over the data.", _ABOVE_0))
    max_steps: int | None = field(default=None, metadata=_run("Instead of epochs.", _COUNT))
    learning_rate: float = field(default=2e-5, metadata=_run("Peak learning rate.", _ABOVE_0))
    lr_scheduler: Scheduler = field(
        default="linear", metadata=_optimizer("linear, cosine, constant, ...")
    )
    batch_size: int = field(default=64, metadata=_run("Samples of an optimizer step.", _COUNT))
    per_device_batch_size: int = field(
        default=1, metadata=_speed("Samples of one forward pass.", _COUNT)
    )
    warmup_steps: int = field(
        default=20, metadata=_optimizer("Steps of rising learning rate.", _FROM_0)
    )
    weight_decay: float = field(default=0.0, metadata=_optimizer("", _FROM_0))
    adam_beta2: float = field(default=0.999, metadata=_optimizer("", _BELOW_1))
    max_grad_norm: float = field(
        default=1.0, metadata=_optimizer("Longer gradients are cut.", _FROM_0)
    )
    lora: LoraConfig | None = field(
        default=None, metadata=_optimizer("Train low-rank adapters, not all weights.")
    )
    packing: bool = field(default=False, metadata=_speed("Several samples a row."))
    group_by_length: bool = field(
        default=True, metadata=_speed("Batches of samples of about one length.")
    )
    attention: Attention = field(
        default="auto", metadata=_speed("auto, eager, sdpa, flex_attention.")
    )
    dtype: Dtype = field(default="float32", metadata=_speed("Of the weights."))
    bf16: bool = field(default=False, metadata=_speed("Compute in bfloat16."))
    gradient_checkpointing: bool = field(default=False, metadata=_speed("Trade time for memory."))
    seed: int = field(default=0, metadata=_run("Of all that is random.", _SEED))
    eval_steps: int = field(
        default=0, metadata=_run("Evaluate that often; 0: at start and end.", _FROM_0)
    )
    logging_steps: int = field(default=10, metadata=_run("Steps between reports of loss.", _COUNT))
    save_steps: int = field(default=200, metadata=_run("Steps between checkpoints.", _COUNT))
    keep_checkpoints: bool = field(
        default=False, metadata=_run("Leave them in OUTPUT.work at the end.")
    )
    resume: bool = field(default=False, metadata=_run("Go on with an interrupted run."))
    overwrite: bool = field(default=False, metadata=_run("Replace an earlier result."))
    progress: bool = field(default=True, metadata=_run("Show how far it is."))

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


def _choices() -> dict[str, tuple[str, ...]]:
    """The words that a setting may be, for each setting of a ``Literal`` type."""
    from blockattn_rag.kv.context import Positions  # loads torch

    hints = get_type_hints(FinetuneConfig, localns={"Positions": Positions})
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}
