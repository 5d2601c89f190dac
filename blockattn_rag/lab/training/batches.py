"""From encoded samples to batches: each sample in each mode, padded, with its tokens' layout."""

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
        modes: ``("block", "full")`` for the papers' recipe. A sample in full mode is a sample of
            one block, the final one.
        positions: ``"reordered"``: every block is re-encoded to its place. ``"composite"``
            (TurboRAG's name for the ablation): every context block starts at position 0, and the
            final block follows the total length of the context.
        sink: Token ids before each block but the first and the final one in block mode; see
            :mod:`blockattn_rag.prompts.sinks`.
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
            # Position 0 of a moved block is its first token.
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
        """Tokens of each item, sinks included, without making the items."""
        counts = []
        for blocks in self.samples["block_lengths"]:
            own = sum(blocks)
            sinks = len(self.sink) * max(0, len(blocks) - 2)
            counts += [own + sinks if mode == "block" else own for mode in self.modes]
        return counts


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes a batch of tensors ``[samples, tokens]`` of the fields of items.

    Padding is at the end, where causal attention lets no real token see it.

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
    """Batches of samples of similar length, in random order; the same for the same epoch.

    transformers' own sampler takes its order from global random state, so a resumed run would see
    another one.

    Args:
        lengths: Tokens of each sample.
        batch_size: Samples of one optimizer step, over all devices.
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
        size, pool = self.batch_size, 50 * self.batch_size  # a pool is ordered by length
        groups: list[list[int]] = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lambda i: -self.lengths[i])
            groups += (near[i : i + size] for i in range(0, len(near), size))
        # A short group comes last, because the groups after it would straddle batches.
        full = len(groups) - (len(groups[-1]) < size)
        shuffled = torch.randperm(full, generator=generator).tolist()
        for i in [*shuffled, *range(full, len(groups))]:
            yield from groups[i]
