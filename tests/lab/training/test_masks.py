"""Block masks: by hand, against the oracle, packed, by model type, and through FlexAttention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from blockattn_rag.check import oracle as reference
from blockattn_rag.check.layout import layout_of as expected_layout
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.lab.training.masks import (
    BlockLengths,
    ModelMasks,
    TokenLayout,
    additive,
    block_mask,
    flex_block_mask,
    mask_function,
    row_layout,
)
from tests.models import tiny_model

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def layout(
    *rows: list[list[int]], length: int | None = None, sink: int = 0, positions: Any = "reordered"
) -> TokenLayout:
    """A batch layout of rows of samples of block lengths, all with a sink of so many tokens."""
    samples = [[BlockLengths(lengths, sink) for lengths in row] for row in rows]
    length = length or max(sum(one.num_tokens for one in row) for row in samples)
    parts = zip(*(row_layout(row, length, positions) for row in samples), strict=True)
    return TokenLayout(*(torch.stack(part) for part in parts))


def drawn(picture: str) -> torch.Tensor:
    rows = picture.split()
    return torch.tensor([[c == "x" for c in row] for row in rows])


def diagonal(masks: list[torch.Tensor]) -> torch.Tensor:
    """One mask with the given ones along its diagonal."""
    whole = torch.zeros(2 * [sum(map(len, masks))], dtype=torch.bool)
    start = 0
    for mask in masks:
        whole[start : start + len(mask), start : start + len(mask)] = mask
        start += len(mask)
    return whole


class TestBlockMask:
    def test_four_blocks_look_as_drawn_in_the_module(self) -> None:
        picture = "x....... xx...... ..x..... ...x.... ...xx... xxxxxx.. xxxxxxx. xxxxxxxx"
        assert torch.equal(block_mask(layout([[2, 1, 2, 3]]))[0, 0], drawn(picture))

    def test_a_single_block_is_the_causal_mask(self) -> None:
        assert torch.equal(block_mask(layout([[4]]))[0, 0], drawn("x... xx.. xxx. xxxx"))

    def test_samples_of_one_row_do_not_see_each_other(self) -> None:
        picture = "x..... xx.... ..x... ...x.. ..xxx. ..xxxx"
        assert torch.equal(block_mask(layout([[2], [1, 1, 2]]))[0, 0], drawn(picture))

    def test_padding_sees_and_is_seen_by_padding_alone(self) -> None:
        mask = block_mask(layout([[1, 1]], length=4))[0, 0]
        assert torch.equal(mask, drawn("x... xx.. ..x. ..xx"))

    def test_a_window_is_counted_in_tokens_with_the_token_itself(self) -> None:
        mask = block_mask(layout([[2, 3]]), window=2)[0, 0]
        assert torch.equal(mask, drawn("x.... xx... .xx.. ..xx. ...xx"))

    def test_a_sink_is_seen_by_its_own_block_alone_as_drawn_in_the_module(self) -> None:
        picture = "x...... xx..... ..x.... ..xx... ..xxx.. xx.xxx. xx.xxxx"
        assert torch.equal(block_mask(layout([[2, 2, 2]], sink=1))[0, 0], drawn(picture))

    @given(LENGTHS, st.sampled_from([None, 1, 3, 50]), st.integers(0, 4))
    @example([1, 1, 1, 2], 3, 2)  # the window of the final block reaches over a sink
    def test_it_equals_the_oracle(self, lengths: list[int], window: int | None, sink: int) -> None:
        found = block_mask(layout([lengths], sink=sink), window=window)[0, 0]
        assert torch.equal(found, reference.block_mask(lengths, window, sink))

    @given(
        st.lists(st.lists(LENGTHS, min_size=1, max_size=3), min_size=1, max_size=3),
        st.integers(0, 3),
    )
    def test_a_batch_of_packed_rows_equals_the_oracle_sample_by_sample(
        self, rows: list[list[list[int]]], sink: int
    ) -> None:
        mask = block_mask(layout(*rows, sink=sink))[:, 0]
        for row, found in zip(rows, mask, strict=True):
            expected = diagonal([reference.block_mask(one, sink_length=sink) for one in row])
            used = len(expected)
            assert torch.equal(found[:used, :used], expected)
            assert not found[used:, :used].any()

    def test_samples_longer_than_their_row_are_refused(self) -> None:
        with pytest.raises(ValueError, match="do not fit"):
            row_layout([BlockLengths([3]), BlockLengths([3])], 5)
        with pytest.raises(ValueError, match="samples of 6 tokens do not fit in a row of 5"):
            row_layout([BlockLengths([1, 1, 1], 3)], 5)

    def test_as_a_summand_it_is_zero_or_the_lowest_number(self) -> None:
        summand = additive(torch.tensor([[True, False]]), torch.bfloat16)
        assert summand.tolist() == [[0.0, torch.finfo(torch.bfloat16).min]]


class TestPositions:
    def test_reordered_positions_run_through_the_sample(self) -> None:
        assert layout([[2, 1, 2]]).position_ids.tolist() == [[0, 1, 2, 3, 4]]

    def test_composite_positions_restart_in_context_blocks_and_go_on_in_the_final_one(self) -> None:
        found = layout([[2, 1, 2]], positions="composite")
        assert found.position_ids.tolist() == [[0, 1, 0, 3, 4]]
        assert found.place.tolist() == [[0, 1, 2, 3, 4]]

    @given(LENGTHS, st.integers(0, 4))
    def test_a_sink_stands_right_before_its_block_as_the_oracle_has_it(
        self, lengths: list[int], sink: int
    ) -> None:
        found = layout([lengths], sink=sink)
        assert torch.equal(found.position_ids[0], expected_layout(lengths, sink).position)
        assert torch.equal(found.place, found.position_ids)

    def test_composite_positions_of_a_sink_are_those_before_0(self) -> None:
        found = layout([[2, 2, 2]], sink=2, positions="composite")
        assert found.position_ids.tolist() == [[0, 1, -2, -1, 0, 1, 4, 5]]
        assert found.place.tolist() == [[0, 1, 0, 1, 2, 3, 4, 5]]

    def test_positions_restart_with_each_sample_of_a_row(self) -> None:
        assert layout([[2], [1, 1]], length=5).position_ids.tolist() == [[0, 1, 0, 1, 0]]


class TestFlexAttention:
    @given(st.lists(LENGTHS, min_size=1, max_size=3), st.sampled_from([None, 3]), st.integers(0, 3))
    def test_the_mask_function_equals_the_dense_mask(
        self, row: list[list[int]], window: int | None, sink: int
    ) -> None:
        where = layout(row, sink=sink)
        length = where.sample.shape[1]
        allowed = mask_function(where, window=window)
        b, q, k = torch.meshgrid(*map(torch.arange, (1, length, length)), indexing="ij")
        assert torch.equal(allowed(b, b, q, k), block_mask(where, window=window)[:, 0])

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    def test_attention_through_it_equals_sdpa(self) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rows = layout([[3, 4, 5], [2, 6]], [[150, 7]])
        where = TokenLayout(*(part.to(device) for part in rows))
        shape = (3, 2, 2, where.sample.shape[1], 16)
        query, key, value = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(
            device
        )
        found = flex_attention(query, key, value, block_mask=flex_block_mask(where))
        expected = F.scaled_dot_product_attention(query, key, value, attn_mask=block_mask(where))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.skipif(
        not torch.cuda.is_available(), reason="FlexAttention has a backward pass on CUDA alone"
    )
    def test_a_model_trains_alike_by_flex_attention_and_sdpa(self) -> None:
        batch = layout([[40, 60, 30], [50, 20]], [[100, 120]])
        batch = TokenLayout(*(part.cuda() for part in batch))
        found = [logits_and_gradient(kind, batch) for kind in ("sdpa", "flex_attention")]
        for sdpa, flex in zip(*found, strict=True):
            torch.testing.assert_close(flex, sdpa, rtol=1e-3, atol=1e-4)


def logits_and_gradient(implementation: str, batch: TokenLayout) -> tuple[Any, Any]:
    """Logits of real tokens, and the gradient of the embeddings, on CUDA."""
    model: Any = tiny_model("llama", hidden_size=64, head_dim=16, num_hidden_layers=2)
    model.to("cuda")
    model.set_attn_implementation(implementation)
    ids = torch.arange(batch.sample.numel(), device="cuda").remainder(250).view(batch.sample.shape)
    mask = ModelMasks(model.config, implementation)(batch, torch.float32)
    out = model(
        input_ids=ids, attention_mask=mask, position_ids=batch.position_ids, use_cache=False
    )
    used = out.logits[batch.sample > 0]
    used.square().mean().backward()
    return used.detach(), model.get_input_embeddings().weight.grad


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "num_hidden_layers": 6},
    "qwen2": {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
}


class TestModelMasks:
    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("family", MODELS)
    def test_models_apply_the_mask_as_the_oracle_does(
        self, family: str, implementation: str
    ) -> None:
        model: Any = tiny_model(family, **MODELS[family])
        model.set_attn_implementation(implementation)
        ids = torch.arange(16)[None] * 7 % 250
        masks = ModelMasks(model.config, implementation)
        blocks = [ids[0, :4].tolist(), ids[0, 4:9].tolist(), ids[0, 9:].tolist()]
        with torch.no_grad():
            mask = masks(layout([[4, 5, 7]]), torch.float32)
            found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[0, -7:]
        model.set_attn_implementation("eager")
        torch.testing.assert_close(found, reference.oracle_logits(model, blocks))

    @pytest.mark.parametrize("family", MODELS)
    def test_a_sink_gives_the_logits_of_the_oracle(self, family: str) -> None:
        model: Any = tiny_model(family, **MODELS[family])
        model.set_attn_implementation("eager")
        ids, sink = (torch.arange(16) * 7 % 250).tolist(), (7, 8, 9)
        blocks = [ids[:4], ids[4:9], ids[9:]]
        where = layout([[4, 5, 7]], sink=len(sink))
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([[*blocks[0], *sink, *blocks[1], *blocks[2]]]),
                attention_mask=ModelMasks(model.config, "eager")(where, torch.float32),
                position_ids=where.position_ids,
                use_cache=False,
            )
        expected = reference.oracle_logits(model, blocks, sink)
        torch.testing.assert_close(out.logits[0, -7:], expected)

    @pytest.mark.parametrize("family", MODELS)
    def test_one_final_block_is_the_models_own_attention(self, family: str) -> None:
        model: Any = tiny_model(family, **MODELS[family])
        model.set_attn_implementation("sdpa")
        ids = torch.arange(16)[None] * 7 % 250
        with torch.no_grad():
            mask = ModelMasks(model.config, "sdpa")(layout([[16]]), torch.float32)
            found = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits)

    def test_an_implementation_that_takes_no_mask_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="flash_attention_2"):
            ModelMasks(tiny_model("llama").config, "flash_attention_2")

    def test_layers_that_attend_otherwise_are_refused(self) -> None:
        config = tiny_model("llama").config
        config.layer_types = ["full_attention", "chunked_attention"]
        with pytest.raises(UnsupportedModelError, match="chunked_attention"):
            ModelMasks(config, "sdpa")
