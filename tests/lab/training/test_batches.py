"""Training batches: layout, mask and loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from blockattn_rag.check import oracle as reference
from blockattn_rag.check.oracle import layout_of as expected_layout
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.lab.trainer import LengthGroupedSampler
from blockattn_rag.lab.training.batches import (
    Collator,
    ModeDataset,
    ModelMasks,
    TokenLayout,
    batch_loss,
    layout_mask,
)
from tests.models import tiny_model

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


class Samples(list[Any]):
    """List of rows that also supports access by column, like ``datasets.Dataset``."""

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


SAMPLES = Samples(
    [
        {"input_ids": [1, 2, 3, 4, 5], "labels": [-100] * 4 + [5], "block_lengths": [2, 3]},
        {"input_ids": [6, 7, 8], "labels": [-100, 7, 8], "block_lengths": [3]},
        {"input_ids": [*range(1, 7)], "labels": [-100] * 5 + [6], "block_lengths": [2, 1, 1, 2]},
    ]
)


def random_samples(count: int) -> Samples:
    """Return samples of two context blocks and a final block whose second half is learned."""
    generator = torch.Generator().manual_seed(0)
    made = Samples()
    for _ in range(count):
        lengths = torch.randint(2, 9, (3,), generator=generator).tolist()
        ids = torch.randint(0, 250, (sum(lengths),), generator=generator).tolist()
        learned = lengths[-1] // 2
        labels = [-100] * (len(ids) - learned) + ids[-learned:]
        made.append({"input_ids": ids, "labels": labels, "block_lengths": lengths})
    return made


def every(dataset: ModeDataset) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


class TestModes:
    def test_every_sample_occurs_once_in_each_mode(self) -> None:
        found = every(ModeDataset(SAMPLES, ["block", "full"]))
        assert [item["block"] for item in found[:4]] == [[1, 1, 0, 0, 0], [0] * 5, [0] * 3, [0] * 3]
        assert [item["input_ids"] for item in found[:2]] == [[1, 2, 3, 4, 5]] * 2
        assert len(every(ModeDataset(SAMPLES, ["full"]))) == 3

    def test_a_sink_precedes_all_blocks_except_the_first_and_the_final_one(self) -> None:
        block, full = every(ModeDataset(SAMPLES, ["block", "full"], sink=[8, 9]))[4:]
        assert block["input_ids"] == [1, 2, 8, 9, 3, 8, 9, 4, 5, 6]
        assert block["labels"] == [-100] * 9 + [6]
        assert block["block"] == [1, 1, -2, -2, 2, -3, -3, 3, 0, 0]
        assert block["position_ids"] == [0, 1, 0, 1, 2, 1, 2, 3, 4, 5]
        assert full["input_ids"] == [*range(1, 7)]

    @pytest.mark.parametrize("sink", [[], [8, 9]])
    def test_tokens_are_counted_with_their_sinks(self, sink: list[int]) -> None:
        dataset = ModeDataset(SAMPLES, ["full", "block"], sink=sink)
        assert dataset.token_counts() == [len(item["input_ids"]) for item in every(dataset)]

    @given(LENGTHS, st.integers(0, 4))
    def test_reordered_positions_equal_the_oracle(self, lengths: list[int], sink: int) -> None:
        found = item_of(lengths, sink)
        assert found["position_ids"] == expected_layout(lengths, sink).position.tolist()
        assert found["place"] == found["position_ids"]

    def test_composite_positions_restart_in_context_blocks(self) -> None:
        found = item_of([2, 2, 2], 2, "composite")
        assert found["position_ids"] == [0, 1, -2, -1, 0, 1, 4, 5]
        assert found["place"] == [0, 1, 0, 1, 2, 3, 4, 5]


def item_of(lengths: list[int], sink: int, positions: Any = "reordered") -> Any:
    """Return the block-mode item of a sample with blocks of these lengths."""
    ids = [0] * sum(lengths)
    sample = {"input_ids": ids, "labels": ids, "block_lengths": lengths}
    return ModeDataset([sample], ["block"], positions, [0] * sink)[0]


class TestCollator:
    def test_rows_are_padded_to_the_longest(self) -> None:
        batch = Collator(99)(every(ModeDataset(SAMPLES, ["block"]))[:2])
        assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 99, 99]]
        assert batch["labels"].tolist() == [[-100] * 4 + [5], [-100, 7, 8, -100, -100]]
        assert batch["block"].tolist() == [[1, 1, 0, 0, 0], [0] * 5]

    @pytest.mark.parametrize("sink", [[], [7, 8, 9]])
    @pytest.mark.parametrize("positions", ["reordered", "composite"])
    def test_padding_does_not_change_gradients(self, positions: Any, sink: list[int]) -> None:
        samples = random_samples(6)
        found = every(ModeDataset(samples, ["block"], positions, sink))
        padded = loss_and_gradients(Collator(0)(found))
        for a, b in zip(padded, plain_loop(samples, positions, sink), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def loss_and_gradients(batch: Any) -> list[torch.Tensor]:
    model: Any = tiny_model("llama", num_hidden_layers=2)
    model.set_attn_implementation("sdpa")
    loss, number = batch_loss(ModelMasks(model.config, "sdpa"), torch.float32, model, batch)
    assert number == (batch["labels"] != -100).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return [loss.detach(), *(p.grad for p in model.parameters())]


def plain_loop(samples: Samples, positions: str, sink: list[int]) -> list[torch.Tensor]:
    """Compute loss and gradients with the oracle's mask, one sample at a time."""
    model: Any = tiny_model("llama", num_hidden_layers=2)
    model.set_attn_implementation("eager")
    total = torch.zeros(())
    for sample in samples:
        first, second, _ = lengths = sample["block_lengths"]
        ids, labels = (
            torch.tensor([*values[:first], *between, *values[first:]])
            for values, between in (
                (sample["input_ids"], sink),
                (sample["labels"], [-100] * len(sink)),
            )
        )
        bias = torch.zeros(len(ids), len(ids))
        bias[~reference.block_mask(lengths, None, len(sink))] = torch.finfo(torch.float32).min
        where = expected_layout(lengths, len(sink)).position
        if positions == "composite":
            where[first : first + len(sink) + second] -= first
        out = model(input_ids=ids[None], attention_mask=bias[None, None], position_ids=where[None])
        total = total + F.cross_entropy(out.logits[0, :-1], labels[1:], reduction="sum")
    total.backward()  # type: ignore[no-untyped-call]
    return [total.detach(), *(p.grad for p in model.parameters())]


class TestSampler:
    @given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 7))
    def test_every_sample_is_drawn_once(self, lengths: list[int], size: int) -> None:
        assert sorted(LengthGroupedSampler(lengths, size, 0)) == list(range(len(lengths)))

    def test_batches_contain_samples_of_similar_length(self) -> None:
        lengths = [i % 100 for i in range(400)]
        order = list(LengthGroupedSampler(lengths, 4, 0))
        batches = ([lengths[i] for i in order[k : k + 4]] for k in range(0, 400, 4))
        assert max(max(batch) - min(batch) for batch in batches) <= 4

    def test_the_order_depends_only_on_the_epoch(self) -> None:
        sampler = LengthGroupedSampler(list(range(40)), 4, 0)
        first = list(sampler)
        sampler.set_epoch(1)
        second = list(sampler)
        sampler.set_epoch(0)
        assert list(sampler) == first != second


def layout(*samples: list[int], sink: int = 0) -> TokenLayout:
    """Return the layout of a batch of samples with blocks of these lengths and a sink."""
    rows = [
        {"input_ids": [0] * sum(lengths), "labels": [0] * sum(lengths), "block_lengths": lengths}
        for lengths in samples
    ]
    dataset = ModeDataset(rows, ["block"], sink=[0] * sink)
    batch = Collator(0)([dataset[i] for i in range(len(dataset))])
    return TokenLayout(*(batch[name] for name in TokenLayout._fields))


def drawn(picture: str) -> torch.Tensor:
    rows = picture.split()
    return torch.tensor([[c == "x" for c in row] for row in rows])


class TestBlockMask:
    @pytest.mark.parametrize(
        ("lengths", "options", "picture"),
        [
            ([2, 1, 2, 3], {}, "x....... xx...... ..x..... ...x.... ...xx... xxxxxx.. xxxxxxx. "
             "xxxxxxxx"),
            ([4], {}, "x... xx.. xxx. xxxx"),
            ([2, 3], {"window": 2}, "x.... xx... .xx.. ..xx. ...xx"),
            ([2, 2, 2], {"sink": 1}, "x...... xx..... ..x.... ..xx... ..xxx.. xx.xxx. xx.xxxx"),
        ],
        ids=["four blocks, as in the module", "one block", "window", "sink, as in the module"],
    )  # fmt: skip
    def test_masks_equal_the_documented_drawings(
        self, lengths: list[int], options: dict[str, int], picture: str
    ) -> None:
        where = layout(lengths, sink=options.get("sink", 0))
        found = layout_mask(where, window=options.get("window"))
        assert torch.equal(found[0, 0], drawn(picture))

    @given(
        st.lists(LENGTHS, min_size=1, max_size=3),
        st.sampled_from([None, 1, 3, 50]),
        st.integers(0, 4),
    )
    @example([[1, 1, 1, 2]], 3, 2)  # the window of the final block spans a sink
    def test_rows_of_a_batch_match_the_oracle_and_ignore_padding(
        self, samples: list[list[int]], window: int | None, sink: int
    ) -> None:
        mask = layout_mask(layout(*samples, sink=sink), window=window)[:, 0]
        for lengths, found in zip(samples, mask, strict=True):
            expected = reference.block_mask(lengths, window, sink)
            used = len(expected)
            assert torch.equal(found[:used, :used], expected)
            assert not found[:used, used:].any()
            assert found.any(dim=-1).all()  # an empty row would give NaN


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "num_hidden_layers": 6},
    "qwen2": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
}


class TestModelMasks:
    @pytest.mark.parametrize("sink", [(), (7, 8, 9)], ids=["no sink", "sink"])
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("family", MODELS)
    def test_logits_match_the_oracle(
        self, family: str, implementation: str, sink: tuple[int, ...]
    ) -> None:
        model: Any = tiny_model(family, **MODELS[family])
        model.set_attn_implementation(implementation)
        ids = (torch.arange(16) * 7 % 250).tolist()
        blocks = [ids[:4], ids[4:9], ids[9:]]
        where = layout([4, 5, 7], sink=len(sink))
        with torch.no_grad():
            found = model(
                input_ids=torch.tensor([[*blocks[0], *sink, *blocks[1], *blocks[2]]]),
                attention_mask=ModelMasks(model.config, implementation)(where, torch.float32),
                position_ids=where.position_ids,
                use_cache=False,
            ).logits[0, -7:]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, reference.oracle_logits(model, blocks, sink))

    @pytest.mark.parametrize("family", MODELS)
    def test_a_single_final_block_uses_the_models_own_attention(self, family: str) -> None:
        model: Any = tiny_model(family, **MODELS[family])
        model.set_attn_implementation("sdpa")
        ids = torch.arange(16)[None] * 7 % 250
        with torch.no_grad():
            mask = ModelMasks(model.config, "sdpa")(layout([16]), torch.float32)
            found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits)

    def test_layers_with_unknown_attention_are_refused(self) -> None:
        config = tiny_model("llama").config
        config.layer_types = ["full_attention", "chunked_attention"]
        with pytest.raises(UnsupportedModelError, match="chunked_attention"):
            ModelMasks(config, "sdpa")
