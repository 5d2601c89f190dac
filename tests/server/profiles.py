"""Profiles of fictitious models, for the tests of serving."""

from __future__ import annotations

from blockattn_rag.server.profile import LayerProfile, ModelProfile, Rotary

SINK_IDS = (256, 7)


def make_profile(
    *,
    heads: tuple[int, ...] = (2, 2),
    key_size: int = 4,
    value_size: int = 4,
    dtype: str = "float32",
    sink_ids: tuple[int, ...] = (),
    fingerprint: str = "f" * 64,
    vocab_size: int = 1 << 40,
) -> ModelProfile:
    """Return a profile with these numbers of heads by layer. Its vocabulary covers ``make_kv``."""
    return ModelProfile(
        fingerprint=fingerprint,
        tokenizer="e" * 64,
        name="made-up",
        dtype=dtype,
        layers=tuple(
            LayerProfile(count, key_size, value_size, 0, index) for index, count in enumerate(heads)
        ),
        rotary=(Rotary("half", (1.0, 0.10000000149011612)),),
        hidden_layers=len(heads),
        vocab_size=vocab_size,
        max_positions=4096,
        sink="head:2" if sink_ids else "none",
        sink_ids=sink_ids,
    )
