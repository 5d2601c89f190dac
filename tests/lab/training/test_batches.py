"""Batches: both modes, padding and packing, weights, order; gradients against a plain loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from blockattn_rag.check import oracle as reference
from blockattn_rag.check.layout import layout_of as expected_layout
from blockattn_rag.lab.training.batches import (
    Collator,
    Item,
    LengthGroupedSampler,
    ModeDataset,
    layout_of,
    pack,
)
from blockattn_rag.lab.training.masks import ModelMasks
from blockattn_rag.lab.training.trainer import weighted_loss
from tests.models import tiny_model

SAMPLES = [
    {"input_ids": [1, 2, 3, 4, 5], "labels": [-100] * 4 + [5], "block_lengths": [2, 3]},
    {"input_ids": [6, 7, 8], "labels": [-100, 7, 8], "block_lengths": [3]},
]

THREE = [
    {"input_ids": [1, 2, 3, 4, 5, 6], "labels": [-100] * 5 + [6], "block_lengths": [2, 1, 1, 2]}
]


class Columns(list[Any]):
    """Rows that also give columns, as ``datasets.Dataset`` does."""

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def items(count: int, *, context_weight: float = 0.0) -> list[Item]:
    """Random samples of two context blocks and a final block whose latter half is learned."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        lengths = torch.randint(2, 9, (3,), generator=generator).tolist()
        ids = torch.randint(0, 250, (sum(lengths),), generator=generator).tolist()
        learned = lengths[-1] // 2
        labels = [-100] * (len(ids) - learned) + ids[-learned:]
        made.append(Item(ids, labels, lengths, context_weight))
    return made


class TestModes:
    def test_every_sample_comes_once_in_each_mode(self) -> None:
        dataset = ModeDataset(SAMPLES, ["block", "full"])
        assert [dataset[i].block_lengths for i in range(len(dataset))] == [[2, 3], [5], [3], [3]]

    def test_in_block_mode_a_sink_stands_before_all_blocks_but_the_first_and_the_final_one(
        self,
    ) -> None:
        block, full = (ModeDataset(THREE, ["block", "full"], sink=[8, 9])[i] for i in range(2))
        assert block.input_ids == [1, 2, 8, 9, 3, 8, 9, 4, 5, 6]
        assert block.labels == [-100] * 9 + [6]
        assert (block.block_lengths, block.sink_tokens) == ([2, 1, 1, 2], 2)
        assert (full.input_ids, full.block_lengths, full.sink_tokens) == ([*range(1, 7)], [6], 0)

    @pytest.mark.parametrize("sink", [[], [8, 9]])
    def test_tokens_are_counted_with_their_sinks(self, sink: list[int]) -> None:
        dataset = ModeDataset(Columns([*THREE, *SAMPLES]), ["full", "block"], sink=sink)
        items = [dataset[i] for i in range(len(dataset))]
        assert dataset.token_counts() == [len(item.input_ids) for item in items]
        assert [item.lengths.num_tokens for item in items] == dataset.token_counts()

    def test_one_mode_alone_keeps_the_number_of_samples(self) -> None:
        dataset = ModeDataset(SAMPLES, ["full"])
        assert [dataset[i].block_lengths for i in range(len(dataset))] == [[5], [3]]


class TestCollator:
    def test_rows_are_padded_to_the_longest(self) -> None:
        batch = Collator(99)([ModeDataset(SAMPLES, ["block"])[i] for i in range(2)])
        assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 99, 99]]
        assert batch["labels"].tolist() == [[-100] * 4 + [5], [-100, 7, 8, -100, -100]]
        assert batch["weights"].tolist() == [[0, 0, 0, 0, 1], [0, 1, 1, 0, 0]]
        assert batch["sample"].tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
        assert batch["block"].tolist() == [[1, 1, 0, 0, 0], [0] * 5]

    def test_context_tokens_weigh_less_and_first_tokens_of_blocks_nothing(self) -> None:
        batch = Collator(0)([ModeDataset(SAMPLES, ["block"], context_weight=0.25)[0]])
        assert batch["weights"].tolist() == [[0, 0.25, 0, 0.25, 1]]
        assert batch["labels"].tolist() == [[1, 2, 3, 4, 5]]

    def test_sinks_and_first_tokens_after_them_are_not_learned(self) -> None:
        batch = Collator(0)([ModeDataset(THREE, ["block"], context_weight=0.5, sink=[8, 9])[0]])
        assert batch["weights"].tolist() == [[0, 0.5, 0, 0, 0, 0, 0, 0, 0, 1]]
        assert batch["block"].tolist() == [[1, 1, -2, -2, 2, -3, -3, 3, 0, 0]]
        assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 1, 2, 3, 4, 5]]

    def test_packing_puts_short_samples_together_within_the_longest_length(self) -> None:
        rows = pack([Item([0] * n, [0] * n, [n], 0.0) for n in (3, 8, 4, 5, 1)], 8)
        assert [[len(item.input_ids) for item in row] for row in rows] == [[8], [5, 3], [4, 1]]

    @pytest.mark.parametrize("sink", [[], [7, 8, 9]])
    @pytest.mark.parametrize("positions", ["reordered", "composite"])
    def test_packed_equals_padded_equals_one_by_one_gradients_included(
        self, positions: Any, sink: list[int]
    ) -> None:
        plain = [*items(6, context_weight=0.3), Item([*range(40)], [*range(40)], [15, 15, 10], 0.3)]
        dataset = ModeDataset([*map(dataclasses.asdict, plain)], ["block"], 0.3, sink)
        found = [dataset[i] for i in range(len(dataset))]
        padded = loss_and_gradients(Collator(0, positions)(found))
        packed_batch = Collator(0, positions, packing=True)(found)
        assert len(packed_batch["input_ids"]) < 7
        for other in (loss_and_gradients(packed_batch), plain_loop(plain, positions, sink)):
            for a, b in zip(padded, other, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def loss_and_gradients(batch: Any) -> list[torch.Tensor]:
    model: Any = tiny_model("llama", num_hidden_layers=2)
    model.set_attn_implementation("sdpa")
    mask = ModelMasks(model.config, "sdpa")(layout_of(batch), torch.float32)
    loss = weighted_loss(model, batch, mask)
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(p.grad for p in model.parameters())]


def plain_loop(samples: list[Item], positions: str, sink: list[int]) -> list[torch.Tensor]:
    """The same by the oracle's mask, one sample at a time, without any shared code."""
    model: Any = tiny_model("llama", num_hidden_layers=2)
    model.set_attn_implementation("eager")
    total = torch.zeros(())
    for item in samples:
        first, second, _ = lengths = item.block_lengths
        after = first + len(sink)  # where the second block begins
        ids = torch.tensor([[*item.input_ids[:first], *sink, *item.input_ids[first:]]])
        own = torch.ones(ids.shape[1], dtype=torch.bool)
        own[first:after] = False
        bias = torch.zeros(len(own), len(own))
        bias[~reference.block_mask(lengths, None, len(sink))] = torch.finfo(torch.float32).min
        where = expected_layout(lengths, len(sink)).position
        if positions == "composite":
            where[first : after + second] -= first
        out = model(input_ids=ids, attention_mask=bias[None, None], position_ids=where[None])
        losses = F.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="none")
        weights = torch.zeros(len(own))
        weights[own] = torch.tensor(
            [item.context_weight if i == -100 else 1.0 for i in item.labels]
        )
        weights[[0, after, after + second]] = 0
        total = total + (losses * weights[1:]).sum()
    total.backward()  # type: ignore[no-untyped-call]
    return [total.detach(), *(p.grad for p in model.parameters())]


class TestSampler:
    @given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 7))
    def test_every_sample_comes_once(self, lengths: list[int], size: int) -> None:
        assert sorted(LengthGroupedSampler(lengths, size, 0)) == list(range(len(lengths)))

    def test_batches_hold_samples_of_about_one_length(self) -> None:
        lengths = [i % 100 for i in range(400)]
        order = list(LengthGroupedSampler(lengths, 4, 0))
        spread = [
            max(batch) - min(batch)
            for batch in ([lengths[i] for i in order[k : k + 4]] for k in range(0, 400, 4))
        ]
        assert max(spread) <= 4

    def test_an_epoch_has_its_own_order_and_always_the_same(self) -> None:
        sampler = LengthGroupedSampler(list(range(40)), 4, 0)
        first = list(sampler)
        sampler.set_epoch(1)
        second = list(sampler)
        sampler.set_epoch(0)
        assert list(sampler) == first != second
