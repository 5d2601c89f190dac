"""Block masks: by hand, against the oracle, and as models apply them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from blockattn_rag.check import oracle as reference
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.lab.training.batches import Collator, ModeDataset
from blockattn_rag.lab.training.masks import ModelMasks, TokenLayout, block_mask
from tests.models import tiny_model

LENGTHS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def layout(*samples: list[int], sink: int = 0) -> TokenLayout:
    """The layout of a batch of samples with blocks of these lengths, all with a sink."""
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
    def test_masks_look_as_drawn(
        self, lengths: list[int], options: dict[str, int], picture: str
    ) -> None:
        where = layout(lengths, sink=options.get("sink", 0))
        found = block_mask(where, window=options.get("window"))
        assert torch.equal(found[0, 0], drawn(picture))

    @given(
        st.lists(LENGTHS, min_size=1, max_size=3),
        st.sampled_from([None, 1, 3, 50]),
        st.integers(0, 4),
    )
    @example([[1, 1, 1, 2]], 3, 2)  # the window of the final block reaches over a sink
    def test_each_row_of_a_batch_equals_the_oracle_and_never_sees_padding(
        self, samples: list[list[int]], window: int | None, sink: int
    ) -> None:
        mask = block_mask(layout(*samples, sink=sink), window=window)[:, 0]
        for lengths, found in zip(samples, mask, strict=True):
            expected = reference.block_mask(lengths, window, sink)
            used = len(expected)
            assert torch.equal(found[:used, :used], expected)
            assert not found[:used, used:].any()
            assert found.any(dim=-1).all()  # no row is empty, which would be NaN


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
    def test_models_give_the_logits_of_the_oracle(
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
    def test_one_final_block_is_the_models_own_attention(self, family: str) -> None:
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
