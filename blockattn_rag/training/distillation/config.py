"""Settings of a distillation run; the command line makes its options from them.

No torch here, because ``--help`` must not load it.
"""
# ruff: noqa: RUF009  The function called in the class returns dataclasses.field.

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_args

from blockattn_rag.prompts.sinks import FIRST_BLOCK
from blockattn_rag.training.config import work_of

T = TypeVar("T")
Fit = Literal["reader", "merge", "correction"]
"""What is fitted: a reader adapter (LoRA), the merge of context and final block (CalMerge), both by
gradients; or a correction of keys and values, in closed form, or by gradients from one that is."""

LEARNING_RATE: dict[Fit, float] = {"reader": 5e-4, "merge": 1e-2, "correction": 1e-4}
SAMPLES = 300
CLOSED_FORM_SAMPLES = 40

# These settings do not change the result, so a resumed run may have other values of them.
_INCIDENTAL = ("output", "answers", "resume", "overwrite", "store_bytes")


def _setting(default: T, text: str) -> T:
    """A field with the help text of its option."""
    return field(default=default, metadata={"help": text})


_COUNTS = ("samples", "min_passages", "max_passages", "max_new_tokens", "top_k", "rank",
           "batch_size", "eval_steps", "store_bytes")  # fmt: skip
_FROM_0 = ("first_token_weight", "cross_entropy_weight", "identity_weight", "warmup_steps",
           "weight_decay", "patience", "seed")  # fmt: skip
_ABOVE_0 = ("epochs", "learning_rate", "max_grad_norm", "alpha")


@dataclass(frozen=True, slots=True)
class AdaptConfig:
    """One distillation run. The defaults for readers are those of a trial on SmolLM2.

    Args:
        output: folder of the result; must not exist. It appears only when complete; what a run
            needs to go on after an interruption lies beside it in ``<output>.work``.
        fit: what is trained.
        sink: what context blocks are encoded after; see ``prompts.sinks``.
        correction: of the passages' keys and values, while a reader or a merge is trained; or that
            a correction is trained from, by gradients; see ``model.correction``.
        merge: how attention to the passages is weighted while a reader is trained; see
            ``attention.context_merge``.
        prompt_format: how a question and its passages become a prompt: a name of
            ``prompts.FORMATS``, or ``"auto"`` for the model's own if it is a known checkpoint and
            ``"chat"`` elsewhere.
        samples: questions with passages to train on; a question may serve in several. None: 300,
            and 40 for a correction in closed form, which needs no more.
        min_passages, max_passages: passages of a sample; the number is drawn for each.
        held_out: share of the questions that are not trained on.
        max_new_tokens: longest answer of the teacher.
        top_k: the teacher's likeliest tokens that are kept, at each token of its answer.
        answers: folder of the teacher's answers, for further runs too; default: in the work folder.
        rank, alpha, targets: of a reader's adapters; alpha None: twice the rank; targets None: all
            linear layers.
        identity_weight: of the squared distance of a merge from the ordinary one, in its loss.
        first_token_weight: weight of an answer's first token in the loss; of the others: 1.
        cross_entropy_weight: weight of the cross-entropy of the teacher's answer in the loss.
        epochs: passes over the samples.
        batch_size: samples of an optimizer step.
        learning_rate: None: 5e-4 for readers, 1e-2 for merges, 1e-4 for corrections; decays
            linearly to 0.
        max_grad_norm: longer gradients are cut.
        eval_steps: steps between measurements of the held-out samples, which are also kept to go on
            from; of the states measured, the best is the result.
        patience: end after so many measurements that are no better than the best; 0: never.
        store_bytes: what passages' keys and values may take on the disk.
        seed: of all that is random.
        resume: go on with an interrupted run.
        overwrite: replace an earlier result, and throw an interrupted run away.

    Raises:
        ValueError: a setting is out of its range.
    """

    output: str | Path
    fit: Fit = _setting(
        "reader",
        "reader: LoRA; merge: weights of the context by head (CalMerge); correction: of passages' "
        "keys and values, in closed form, which takes minutes; with --correction, by gradients.",
    )
    sink: str = _setting("none", "What passages are encoded after: none, bos, head:4, first-block.")
    correction: str = _setting(
        "none",
        "File of a correction of the passages' keys and values; with --fit correction, the one to "
        "train further.",
    )
    merge: str = _setting("none", "Merge of the context that a reader is trained on top of.")
    prompt_format: str = _setting(
        "auto", "auto (a known checkpoint's own, else chat), chat, block-attention, turborag, ..."
    )
    samples: int | None = _setting(None, "Prompts to train on: 300; 40 for a correction.")
    min_passages: int = _setting(1, "Fewest passages of a prompt.")
    max_passages: int = _setting(5, "Most passages of a prompt; as many as will be retrieved.")
    held_out: float = _setting(0.1, "Share of questions that measure what was learned.")
    max_new_tokens: int = _setting(24, "Longest answer of full mode.")
    top_k: int = _setting(64, "Full mode's likeliest tokens that are kept.")
    answers: Path | None = _setting(None, "Keep full mode's answers there, for further runs.")
    rank: int = _setting(16, "Of a reader's adapters.")
    alpha: float | None = _setting(None, "Of a reader's adapters; twice the rank.")
    targets: tuple[str, ...] | None = _setting(None, "Layers to adapt; repeatable; all linear.")
    identity_weight: float = _setting(1e-3, "Of a merge's distance from plain attention.")
    first_token_weight: float = _setting(2.0, "Of an answer's first token; of others: 1.")
    cross_entropy_weight: float = _setting(0.0, "Of the cross-entropy of full mode's answer.")
    epochs: float = _setting(1.0, "Passes over the prompts.")
    batch_size: int = _setting(4, "Prompts of an optimizer step.")
    learning_rate: float | None = _setting(
        None, "Peak; 5e-4 for readers, 1e-2 for merges, 1e-4 for corrections."
    )
    warmup_steps: int = _setting(5, "Steps of rising learning rate.")
    weight_decay: float = _setting(0.0, "")
    adam_beta2: float = _setting(0.98, "")
    max_grad_norm: float = _setting(1.0, "Longer gradients are cut.")
    eval_steps: int = _setting(25, "Measure and save that often; the best state is the result.")
    patience: int = _setting(0, "End after so many measurements without gain; 0: never.")
    store_bytes: int = _setting(8 << 30, "What passages' keys and values may take on the disk.")
    seed: int = _setting(0, "Of all that is random.")
    resume: bool = _setting(False, "Go on with an interrupted run.")
    overwrite: bool = _setting(False, "Replace an earlier result.")

    def __post_init__(self) -> None:
        if self.fit not in get_args(Fit):
            raise ValueError(f"fit must be of {get_args(Fit)}, found {self.fit!r}")
        for names, words, fits in (
            (_COUNTS, "1 or more", lambda found: found >= 1),
            (_FROM_0, "0 or more", lambda found: found >= 0),
            (_ABOVE_0, "above 0", lambda found: found > 0),
            (("adam_beta2",), "0 to below 1", lambda found: 0 <= found < 1),
            (("held_out",), "above 0 and below 1", lambda found: 0 < found < 1),
        ):
            for name in names:
                found = getattr(self, name)
                if found is not None and not (math.isfinite(found) and fits(found)):
                    raise ValueError(f"{name} is {found}, expected {words}")
        if self.fit == "merge" and self.merge != "none":
            raise ValueError(f"found merge={self.merge!r} where a merge is fitted, expected 'none'")
        if self.fit == "correction" and self.merge != "none":
            raise ValueError(f"found merge={self.merge!r}, which does not matter to a correction")
        if self.fit == "correction" and self.sink == FIRST_BLOCK:
            raise ValueError(
                f"found sink={self.sink!r} where a correction is fitted, which needs one that is "
                "the same for all prompts: expected 'none', 'bos' or 'head:N', such as 'head:4'"
            )
        if self.min_passages > self.max_passages:
            raise ValueError(
                f"min_passages is {self.min_passages}, expected at most max_passages "
                f"({self.max_passages})"
            )
        if not Path(self.output).name.strip("."):
            raise ValueError(f"output must name a folder, found {str(self.output)!r}")
        if self.resume and self.overwrite:
            raise ValueError("resume and overwrite exclude each other")

    @property
    def work(self) -> Path:
        """Where all that a run goes on from lies while it lasts."""
        return work_of(Path(self.output))

    @property
    def answers_folder(self) -> Path:
        """Where the teacher's answers lie."""
        return self.work / "answers" if self.answers is None else Path(self.answers)

    @property
    def is_closed_form(self) -> bool:
        """Whether nothing is trained by gradients."""
        return self.fit == "correction" and self.correction == "none"

    @property
    def peak_learning_rate(self) -> float:
        rate = self.learning_rate
        return LEARNING_RATE[self.fit] if rate is None else rate

    @property
    def num_samples(self) -> int:
        most = CLOSED_FORM_SAMPLES if self.is_closed_form else SAMPLES
        return most if self.samples is None else self.samples

    def decisive(self) -> dict[str, object]:
        """The settings that decide the result."""
        return {k: v for k, v in asdict(self).items() if k not in _INCIDENTAL}
