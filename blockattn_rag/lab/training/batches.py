"""From encoded samples to batches: both modes of a sample, padding or packing, order by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler

from blockattn_rag.engine.results import Mode
from blockattn_rag.kv.context import Positions
from blockattn_rag.lab.training.data import IGNORED, EncodedSample
from blockattn_rag.lab.training.masks import BlockLengths, TokenLayout, row_layout


@dataclass(frozen=True, slots=True)
class Item(EncodedSample):
    """One sample in one mode.

    ``context_weight``: in the loss, of tokens not in an answer. ``sink_tokens``: of the sink that
    ``input_ids`` and ``labels`` hold before each block but the first and the final one;
    ``block_lengths`` do not count it.
    """

    context_weight: float
    sink_tokens: int = 0

    @property
    def lengths(self) -> BlockLengths:
        return BlockLengths(self.block_lengths, self.sink_tokens)


@dataclass(frozen=True, eq=False)
class ModeDataset(Dataset[Item]):
    """Every sample once in each mode.

    Args:
        samples: a ``datasets.Dataset`` (or list of dicts) with the columns of ``EncodedSample``.
        modes: the modes, ``("block", "full")`` for the papers' recipe. A sample in full mode is a
            sample of one block, the final one.
        context_weight: weight in the loss of tokens that are not in an answer.
        sink: token ids that blocks are encoded after in block mode; see
            :mod:`blockattn_rag.prompts.sinks`.
    """

    samples: Any
    modes: Sequence[Mode]
    context_weight: float = 0.0
    sink: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.samples) * len(self.modes)

    def __getitem__(self, index: int) -> Item:
        sample = self.samples[index // len(self.modes)]
        ids, labels, blocks = (sample[k] for k in ("input_ids", "labels", "block_lengths"))
        if self.modes[index % len(self.modes)] == "full":
            return Item(ids, labels, [len(ids)], self.context_weight)
        sink = list(self.sink)
        lengths = BlockLengths(blocks, len(sink))
        return Item(
            _with_sinks(ids, sink, lengths),
            _with_sinks(labels, [IGNORED] * len(sink), lengths),
            blocks,
            self.context_weight,
            len(sink),
        )

    def token_counts(self) -> list[int]:
        """Tokens of each item, sinks included, without the items themselves."""
        counts = []
        for blocks in self.samples["block_lengths"]:
            sink = len(self.sink)
            in_mode = {"block": BlockLengths(blocks, sink).num_tokens, "full": sum(blocks)}
            counts += [in_mode[mode] for mode in self.modes]
        return counts


def _with_sinks(values: list[int], sink: list[int], lengths: BlockLengths) -> list[int]:
    """The values of a sample's tokens with those of the sink before each block that has one."""
    joined: list[int] = []
    start = 0
    for own, count in zip(lengths.blocks, lengths.sinks, strict=True):
        joined += sink[:count] + values[start : start + own]
        start += own
    return joined


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes a batch of tensors ``[rows, tokens]``.

    Keys: ``input_ids``, ``labels`` (``-100`` for padding), ``weights`` (float32, each token's
    weight in the loss), and the fields of a ``TokenLayout``.

    Args:
        pad_token_id: what fills up rows.
        positions: see ``masks.row_layout``.
        packing: put several samples into a row where they fit in the longest one's length, instead
            of one sample a row. The gradient is the same.
    """

    pad_token_id: int
    positions: Positions = "reordered"
    packing: bool = False

    def __call__(self, items: Sequence[Item]) -> dict[str, Tensor]:
        length = max(len(item.input_ids) for item in items)
        rows = pack(items, length) if self.packing else [[item] for item in items]
        blocks = ([item.lengths for item in row] for row in rows)
        layouts = (row_layout(lengths, length, self.positions) for lengths in blocks)
        layout = TokenLayout(*map(torch.stack, zip(*layouts, strict=True)))
        return {
            "input_ids": _padded(rows, lambda item: item.input_ids, self.pad_token_id),
            "labels": _padded(rows, _targets, IGNORED),
            "weights": _padded(rows, _weights, 0.0),
            **layout._asdict(),
        }


def layout_of(batch: dict[str, Tensor]) -> TokenLayout:
    """The layout that the collator put in a batch."""
    return TokenLayout(*(batch[name] for name in TokenLayout._fields))


def pack(items: Sequence[Item], length: int) -> list[list[Item]]:
    """Rows of at most ``length`` tokens: each item, longest first, into the first row with room."""
    rows: list[list[Item]] = []
    for item in sorted(items, key=lambda item: -len(item.input_ids)):
        for row in rows:
            if sum(len(packed.input_ids) for packed in [*row, item]) <= length:
                row.append(item)
                break
        else:
            rows.append([item])
    return rows


def _targets(item: Item) -> list[int]:
    return item.input_ids if item.context_weight else item.labels


def _weights(item: Item) -> list[float]:
    """1 for answers, the context weight for the rest, 0 for sinks and every block's first token.

    The first token of a block is predicted from the end of another one or of a sink, which it does
    not follow in any text.
    """
    weights = [1.0 if label != IGNORED else item.context_weight for label in item.labels]
    start = 0
    for own, sink in zip(item.lengths.blocks, item.lengths.sinks, strict=True):
        weights[start : start + sink + 1] = [0.0] * (sink + 1)
        start += sink + own
    return weights


def _padded(
    rows: Sequence[Sequence[Item]], values: Callable[[Item], Sequence[float]], filler: float
) -> Tensor:
    """The values of each row's items one after the other, up to the length of the longest row."""
    joined = [torch.tensor([value for item in row for value in values(item)]) for row in rows]
    return pad_sequence(joined, batch_first=True, padding_value=filler)


@dataclass(eq=False)
class LengthGroupedSampler(Sampler[int]):
    """Batches of samples of about one length, in random order; the same for the same epoch.

    Args:
        lengths: tokens of each sample.
        batch_size: samples of one optimizer step, over all devices.
        seed: of the shuffling, together with the epoch.
    """

    lengths: Sequence[int]
    batch_size: int
    seed: int
    epoch: int = field(default=0, init=False)

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer at the start of each epoch."""
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
