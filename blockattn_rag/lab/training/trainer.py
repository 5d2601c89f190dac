"""The Trainer of block fine-tuning, with the block mask and the loss on answers by mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, Sampler

from blockattn_rag.errors import DivergedError
from blockattn_rag.lab.trainer import REMEDY, LabTrainer
from blockattn_rag.lab.training.batches import LengthGroupedSampler
from blockattn_rag.lab.training.data import IGNORED
from blockattn_rag.lab.training.masks import ModelMasks, TokenLayout


class BlockTrainer(LabTrainer):
    """Trains on batches of :class:`~blockattn_rag.lab.training.batches.Collator`.

    Args:
        masks: Makes the model's ``attention_mask``.
        lengths: Number of tokens of each training item, for batches of similar length.
        settings: Arguments of ``LabTrainer``. ``eval_dataset`` is a dict of evaluation datasets by
            mode, or None.
    """

    def __init__(self, *, masks: ModelMasks, lengths: list[int], **settings: Any) -> None:
        super().__init__(**settings)
        self._masks, self._lengths = masks, lengths
        self._mask_dtype: torch.dtype = settings["model"].dtype
        # The Trainer must not scale: compute_loss divides by the tokens of the accumulated batch.
        self.model_accepts_loss_kwargs = True

    def check_finite(self) -> None:
        """Raise ``DivergedError`` if weights are not finite.

        The last step may damage weights, but no loss is computed after it.
        """
        model: Any = self.model
        finite = torch.tensor(all(bool(p.isfinite().all()) for p in model.parameters()))
        if not self.accelerator.gather(finite.to(self.args.device)).all():
            raise DivergedError(f"some of the trained weights are not finite; {REMEDY}")

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean cross-entropy of the answers' tokens over the whole accumulated batch."""
        # Gradients are averaged over processes, and the tokens are summed over them.
        return self._loss(model, inputs) * self.accelerator.num_processes / num_items_in_batch

    def _loss(self, model: Any, batch: Mapping[str, Tensor]) -> Tensor:
        layout = TokenLayout(*(batch[name] for name in TokenLayout._fields))
        return answer_loss(model, batch, self._masks(layout, self._mask_dtype))

    def _get_train_sampler(self, train_dataset: Dataset[Any] | None = None) -> Sampler[int]:
        size = self.args.train_batch_size * self.args.gradient_accumulation_steps
        return LengthGroupedSampler(self._lengths, size * self.args.world_size, self.args.seed)

    def measured(self) -> dict[str, float]:
        """Mean loss of the answers' tokens for each evaluation set, as ``eval_<name>_loss``."""
        model: Any = self.model
        was_training = model.training
        model.eval()
        sets: Any = self.eval_dataset or {}
        found = {f"eval_{name}_loss": self._mean_loss(data) for name, data in sets.items()}
        model.train(was_training)
        return found

    @torch.no_grad()
    def _mean_loss(self, dataset: Dataset[Any]) -> float:
        sums = torch.zeros(2, device=self.args.device)
        for batch in self.get_eval_dataloader(dataset):
            batch = self._prepare_inputs(batch)
            with self.compute_loss_context_manager():
                loss = self._loss(self.model_wrapped, batch)
            sums += torch.stack([loss, (batch["labels"] != IGNORED).sum()])
        loss, tokens = self.accelerator.reduce(sums, "sum").tolist()
        return float(loss / tokens)


def answer_loss(model: Any, batch: Mapping[str, Tensor], mask: Any) -> Tensor:
    """Sum of the cross-entropy of a batch's labels, each predicted from the preceding tokens.

    Logits are computed only at positions where a row has a label. With long contexts and large
    vocabularies, the logits of all positions would be the largest tensor of the step.

    Args:
        model: The model.
        batch: Batch of a ``Collator``.
        mask: The model's ``attention_mask``.
    """
    labels = batch["labels"][:, 1:]
    columns = (labels != IGNORED).any(dim=0).nonzero().flatten()
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=mask,
        position_ids=batch["position_ids"],
        use_cache=False,
        logits_to_keep=columns,
    ).logits
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels[:, columns].flatten(), reduction="sum"
    )
