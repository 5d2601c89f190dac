"""Profiles of fictitious models, for the tests of serving."""

from __future__ import annotations

import torch

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.server.profile import LayerProfile, ModelProfile
from blockattn_rag.server.protocol import ServerInfo

SINK_IDS = (256, 7)


def make_profile(
    *,
    heads: tuple[int, ...] = (2, 2),
    key_size: int = 4,
    value_size: int = 4,
    dtype: torch.dtype = torch.float32,
    sink_ids: tuple[int, ...] = (),
    fingerprint: str = "f" * 64,
    vocab_size: int = 1 << 40,
) -> ModelProfile:
    """Return a profile with these numbers of heads by layer. Its vocabulary covers ``make_kv``."""
    layout = RotaryLayout(torch.tensor([1.0, 0.1]), "half")
    return ModelProfile(
        fingerprint=fingerprint,
        tokenizer="e" * 64,
        name="made-up",
        dtype=dtype,
        layers=tuple(LayerProfile(n, key_size, value_size, layout, i) for i, n in enumerate(heads)),
        hidden_layers=len(heads),
        vocab_size=vocab_size,
        max_positions=4096,
        recipe=RecipeOutline("head:2" if sink_ids else "none"),
        sink_ids=sink_ids,
    )


SERVER_INFO = ServerInfo(
    fingerprint="a" * 64,
    tokenizer="b" * 64,
    sink="head:4",
    adapter="c" * 64,
    promote=1,
    recompute=0.1,
    block_tuned=True,
    models=("llama", "other"),
    max_tokens=4096,
    namespace="tenant",
    read_only=True,
    has_chat_template=True,
    marker_key="0" * 16,
)
