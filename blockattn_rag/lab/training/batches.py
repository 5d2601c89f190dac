"""Batches of encoded samples (each sample in each mode, padded), and the loss of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Positions
from blockattn_rag.lab.training.data import IGNORED
from blockattn_rag.lab.training.masks import FINAL, ModelMasks, TokenLayout

Item = Mapping[str, list[int]]
"""A sample in one mode: ``input_ids``, ``labels``, and the fields of a ``TokenLayout``."""


@dataclass(frozen=True, eq=False)
class ModeDataset(Dataset[Item]):
    """Every sample once in each mode.

    Args:
        samples: A ``datasets.Dataset`` with the columns of ``EncodedSample``.
        modes: ``("block", "full")`` as in the papers. In full mode, a sample has one block, the
            final block.
        positions: ``"reordered"``: every block has the positions of its place in the prompt.
            ``"composite"`` (TurboRAG's name for this ablation): every context block starts at
            position 0, and the final block starts after the total length of the context.
        sink: Token ids before each block in block mode, except before the first and the final
            block; see :mod:`blockattn_rag.prompts.sinks`.
    """

    samples: Any
    modes: Sequence[Mode]
    positions: Positions = "reordered"
    sink: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.samples) * len(self.modes)

    def __getitem__(self, index: int) -> Item:
        sample = self.samples[index // len(self.modes)]
        blocks = sample["block_lengths"]
        if self.modes[index % len(self.modes)] == "full":
            blocks = [sum(blocks)]
        return self._item(sample["input_ids"], sample["labels"], blocks)

    def _item(self, ids: list[int], labels: list[int], blocks: Sequence[int]) -> Item:
        names = ("input_ids", "labels", *TokenLayout._fields)
        item: dict[str, list[int]] = {name: [] for name in names}
        start, last = 0, len(blocks) - 1
        for index, length in enumerate(blocks):
            sink = list(self.sink) if 0 < index < last else []
            end = start + length
            places = range(start - len(sink), end)
            # A moved block starts at position 0.
            shift = start if self.positions == "composite" and index != last else 0
            number = FINAL if index == last else index + 1
            item["input_ids"] += sink + ids[start:end]
            item["labels"] += [IGNORED] * len(sink) + labels[start:end]
            item["block"] += [-number] * len(sink) + [number] * length
            item["place"] += places
            item["position_ids"] += [place - shift for place in places]
            start = end
        return item

    def token_counts(self) -> list[int]:
        """Number of tokens of each item, including sinks, computed without making the items."""
        counts = []
        for blocks in self.samples["block_lengths"]:
            own = sum(blocks)
            sinks = len(self.sink) * max(0, len(blocks) - 2)
            counts += [own + sinks if mode == "block" else own for mode in self.modes]
        return counts


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes a batch of tensors ``[samples, tokens]`` from the fields of items.

    Padding is at the end, so with causal attention no real token attends to it.

    Args:
        pad_token_id: Token id of padding.
    """

    pad_token_id: int

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        fillers = {"input_ids": self.pad_token_id, "labels": IGNORED}
        return {
            name: pad_sequence(
                [torch.tensor(item[name]) for item in items],
                batch_first=True,
                padding_value=fillers.get(name, 0),
            )
            for name in items[0]
        }


def batch_loss(
    masks: ModelMasks, dtype: torch.dtype, model: Any, batch: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """The loss of a batch for ``LabTrainer``: sum over the answers' tokens, and their number.

    Args:
        masks: Makes the model's ``attention_mask``.
        dtype: Type of the masks.
        model: The model.
        batch: Batch of a ``Collator``.
    """
    layout = TokenLayout(*(batch[name] for name in TokenLayout._fields))
    total = answer_loss(model, batch, masks(layout, dtype))
    return total, (batch["labels"] != IGNORED).sum()


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
