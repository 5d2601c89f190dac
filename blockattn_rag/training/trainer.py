"""transformers' Trainer with the block mask, a loss weighted by token, and evaluation by mode."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler
from transformers import Trainer, TrainerState

from blockattn_rag.training.batches import LengthGroupedSampler, layout_of
from blockattn_rag.training.masks import ModelMasks


class BlockTrainer(Trainer):
    """Trains on batches of :class:`~blockattn_rag.training.batches.Collator`.

    Args:
        masks: makes the model's ``attention_mask``.
        lengths: tokens of each training item, for batches of about one length; None for random
            order.
        eval_sets: a dataset for each name (mode) to report a loss for.
        settings: arguments of ``transformers.Trainer``.
    """

    def __init__(
        self,
        *,
        masks: ModelMasks,
        lengths: list[int] | None,
        eval_sets: Mapping[str, Dataset[Any]],
        **settings: Any,
    ) -> None:
        super().__init__(**settings, eval_dataset=dict(eval_sets) or None)
        self.masks = masks
        self.mask_dtype: torch.dtype = settings["model"].dtype
        self.eval_sets = dict(eval_sets)
        self._lengths = lengths
        base = settings["model"]
        base = base.get_base_model() if hasattr(base, "get_base_model") else base
        self._can_choose_logits = "logits_to_keep" in inspect.signature(base.forward).parameters
        # compute_loss divides by the weight of the whole accumulated batch; no other scaling then.
        self.model_accepts_loss_kwargs = True

    def restore(self, checkpoint: str) -> None:
        """Take up weights and state of the last step: ``train`` would add one more."""
        self._load_from_checkpoint(checkpoint)
        self.state = TrainerState.load_from_json(f"{checkpoint}/trainer_state.json")

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
        return weighted_loss(model, batch, mask, choose_logits=self._can_choose_logits)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Weight of all tokens of one optimizer step, over all processes."""
        weight = sum(batch["weights"][:, 1:].sum() for batch in batch_samples)
        return self.accelerator.gather(torch.as_tensor(weight, device=device)).sum()

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int] | None:
        if self._lengths is None:
            sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
            return sampler
        arguments = self.args
        step = arguments.train_batch_size * arguments.gradient_accumulation_steps
        return LengthGroupedSampler(self._lengths, step * arguments.world_size, arguments.seed)

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Mean loss of the answers' tokens for each evaluation set, as ``eval_<name>_loss``."""
        model: Any = self.model
        was_training = model.training
        model.eval()
        metrics = {f"eval_{name}_loss": self._mean_loss(s) for name, s in self.eval_sets.items()}
        model.train(was_training)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
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


def weighted_loss(
    model: Any, batch: Mapping[str, Tensor], mask: Any, *, choose_logits: bool
) -> Tensor:
    """Sum over a batch of weight x cross-entropy of the token to come.

    Args:
        batch: of a ``Collator``.
        mask: what the model takes as ``attention_mask``.
        choose_logits: whether the model can make logits for chosen tokens alone. Only those before
            a token that some row learns are then made: with long contexts and large vocabularies,
            all of them would be the largest tensor of the step.
    """
    targets, weights = batch["labels"][:, 1:], batch["weights"][:, 1:]
    columns = weights.any(dim=0).nonzero().flatten()
    chosen = {"logits_to_keep": columns} if choose_logits else {}
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=mask,
        position_ids=batch["position_ids"],
        use_cache=False,
        **chosen,
    ).logits
    if not choose_logits:
        logits = logits[:, columns]
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), targets[:, columns].flatten(), reduction="none"
    )
    return (losses * weights[:, columns].flatten()).sum()
