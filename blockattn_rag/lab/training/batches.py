"""Batches of encoded samples: each sample in each mode, padded, with the layout of its tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Positions
from blockattn_rag.lab.training.data import IGNORED
from blockattn_rag.lab.training.masks import FINAL, TokenLayout

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


@dataclass(eq=False)
class LengthGroupedSampler(Sampler[int]):
    """Sampler of batches with similar lengths, in random order that is the same in every run.

    The order of transformers' own sampler depends on global random state, so a resumed run would
    use another order.

    Args:
        lengths: Number of tokens of each sample.
        batch_size: Samples per optimizer step, over all devices.
        seed: Random seed, combined with the epoch.
    """

    lengths: Sequence[int]
    batch_size: int
    seed: int
    epoch: int = field(default=0, init=False)

    def set_epoch(self, epoch: int) -> None:
        """Called by the Trainer at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        size, pool = self.batch_size, 50 * self.batch_size  # each pool is sorted by length
        groups: list[list[int]] = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lambda i: -self.lengths[i])
            groups += (near[i : i + size] for i in range(0, len(near), size))
        # An incomplete group comes last. Otherwise, the groups after it would straddle batches.
        full = len(groups) - (len(groups[-1]) < size)
        shuffled = torch.randperm(full, generator=generator).tolist()
        for i in [*shuffled, *range(full, len(groups))]:
            yield from groups[i]
