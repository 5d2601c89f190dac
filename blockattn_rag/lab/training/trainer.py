"""transformers' Trainer with the block mask, a loss weighted by token, evaluation by mode, and an
end to runs that diverge."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerCallback, TrainerState

from blockattn_rag.errors import DivergedError
from blockattn_rag.lab.training.batches import LengthGroupedSampler, layout_of
from blockattn_rag.lab.training.masks import ModelMasks

logger = logging.getLogger("blockattn_rag")

_REMEDY = (
    "start again (overwrite=True, --overwrite) with a lower learning rate or more warm-up steps"
)
_ALL_WARM_UP = (
    "the run has %d steps and the warm-up %d: the learning rate of %g is not reached; take fewer "
    "warm-up steps (warmup_steps, --warmup-steps), smaller batches (batch_size, --batch-size) or "
    "more epochs"
)


class Watch(TrainerCallback):
    """What the Trainer leaves out: the intervals of a resumed run, a warning of a warm-up without
    end, a stop at divergence, and the log of the last step."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take up the intervals of these settings, because the state of a resumed run holds older
        ones; and warn of a run that ends before its warm-up."""
        state.compute_steps(args, state.max_steps)
        warm_up = args.get_warmup_steps(state.max_steps)
        has_warm_up = args.lr_scheduler_type != "constant" and state.is_world_process_zero
        if has_warm_up and warm_up >= state.max_steps:
            logger.warning(_ALL_WARM_UP, state.max_steps, warm_up, args.learning_rate)

    def on_log(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        """Raises ``DivergedError`` for a loss that is not finite: no later step mends it."""
        for name, value in found["logs"].items():
            if name.endswith("loss") and not math.isfinite(value):
                raise DivergedError(f"{name} is {value} at step {state.global_step}; {_REMEDY}")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the last step, because the Trainer logs only every ``logging_steps``-th."""
        if state.global_step >= state.max_steps:
            control.should_log = True


class BlockTrainer(Trainer):
    """Trains on batches of :class:`~blockattn_rag.lab.training.batches.Collator`.

    Args:
        masks: makes the model's ``attention_mask``.
        lengths: tokens of each training item, for batches of about one length; None for random
            order.
        settings: arguments of ``transformers.Trainer``; ``eval_dataset`` is None, or a dict with a
            dataset for each name (mode) to report a loss for.
    """

    def __init__(self, *, masks: ModelMasks, lengths: list[int] | None, **settings: Any) -> None:
        super().__init__(**settings)
        self.masks = masks
        self.mask_dtype: torch.dtype = settings["model"].dtype
        self._lengths = lengths
        # compute_loss divides by the weight of the whole accumulated batch; no other scaling then.
        self.model_accepts_loss_kwargs = True

    def train_from(self, checkpoint: Path | None) -> None:
        """Train to the end, from ``checkpoint`` if given. Where that is the last step's, its
        weights and state are taken up: ``train`` would add one step more."""
        if checkpoint:
            state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
            if state.global_step >= state.max_steps:
                self._load_from_checkpoint(str(checkpoint))
                self.state = state
                return
        self.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)

    def check_finite(self) -> None:
        """Raises ``DivergedError``: the last step may spoil weights with no loss that shows it."""
        model: Any = self.model
        finite = torch.tensor(all(bool(p.isfinite().all()) for p in model.parameters()))
        if not self.accelerator.gather(finite.to(self.args.device)).all():
            raise DivergedError(f"some of the trained weights are not finite; {_REMEDY}")

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean of the tokens' cross-entropy, weighted, over the whole accumulated batch."""
        if return_outputs:
            raise NotImplementedError("BlockTrainer evaluates losses, not outputs")
        total = self._loss(model, inputs)
        weight = inputs["weights"].sum() if num_items_in_batch is None else num_items_in_batch
        # Gradients are averaged over processes, and the weight is summed over them.
        return total * self.accelerator.num_processes / weight

    def _loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        mask = self.masks(layout_of(batch), self.mask_dtype)
        return weighted_loss(model, batch, mask)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Weight of all tokens of one optimizer step, over all processes."""
        weight = sum(batch["weights"][:, 1:].sum() for batch in batch_samples)
        return self.accelerator.gather(torch.as_tensor(weight, device=device)).sum()

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        if self._lengths is None:
            return super()._get_train_sampler(train_dataset)
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(self._lengths, size * self.args.world_size, self.args.seed)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Mean loss of the answers' tokens for each evaluation set, as ``eval_<name>_loss``."""
        model: Any = self.model
        was_training = model.training
        model.eval()
        sets: Any = self.eval_dataset or {}
        metrics = {f"eval_{name}_loss": self._mean_loss(data) for name, data in sets.items()}
        model.train(was_training)
        self.log(metrics)
        handler = self.callback_handler
        self.control = handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    @torch.no_grad()
    def _mean_loss(self, dataset: Dataset[Any]) -> float:
        sums = torch.zeros(2, device=self.args.device)
        for batch in self.get_eval_dataloader(dataset):
            batch = self._prepare_inputs(batch)
            with self.compute_loss_context_manager():
                loss = self._loss(self.model_wrapped, batch)
            sums += torch.stack([loss, batch["weights"][:, 1:].sum()])
        loss, weight = self.accelerator.reduce(sums, "sum").tolist()
        return float(loss / weight)


def weighted_loss(model: Any, batch: Mapping[str, Tensor], mask: Any) -> Tensor:
    """Sum over a batch of weight x cross-entropy of the token to come.

    Logits are made before those tokens alone that some row learns: with long contexts and large
    vocabularies, all of them would be the largest tensor of the step.

    Args:
        batch: of a ``Collator``.
        mask: what the model takes as ``attention_mask``.
    """
    targets, weights = batch["labels"][:, 1:], batch["weights"][:, 1:]
    columns = weights.any(dim=0).nonzero().flatten()
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=mask,
        position_ids=batch["position_ids"],
        use_cache=False,
        logits_to_keep=columns,
    ).logits
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), targets[:, columns].flatten(), reduction="none"
    )
    return (losses * weights[:, columns].flatten()).sum()
