"""Measures the profile of a model, for servers whose engines do not use transformers."""

from __future__ import annotations

from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.rope import RotaryLayout
from blockattn_rag.model.block_model import BlockModel
from blockattn_rag.model.probe import vocabulary_size
from blockattn_rag.prompts.sinks import NO_SINK, sink_ids
from blockattn_rag.server.profile import DTYPES, LayerProfile, ModelProfile, Rotary


def profile_of(model: BlockModel, sink: str | None = None) -> ModelProfile:
    """Measure the profile of a model. Reads all weights, for ``BlockModel.fingerprint``.

    Args:
        sink: Sink that context blocks are encoded with. Default: the sink that the model was
            block-fine-tuned with, or none.

    Raises:
        ValueError: The sink is unknown.
        UnsupportedModelError: Keys and values have several dtypes, or an unsupported one.
    """
    sink = model.tuned_with.get("sink", NO_SINK) if sink is None else sink
    ids = sink_ids(sink, model.tokenizer)
    with model.lock:  # the fingerprint may measure the layouts again
        fingerprint, attention = model.fingerprint, model.profile
    kinds = {kind for _, _, kind in attention.token_outline}
    names = [name for name, dtype in DTYPES.items() if kinds == {dtype}]
    if not names:
        raise UnsupportedModelError(
            f"{model.name} has keys and values of {', '.join(sorted(map(str, kinds)))}, expected "
            f"one of {', '.join(DTYPES)}; load the model with a dtype"
        )
    rotary: list[RotaryLayout] = []
    for layout in attention.layouts:
        if not any(layout is known for known in rotary):
            rotary.append(layout)
    places = {id(layout): place for place, layout in enumerate(rotary)}
    layers = tuple(
        LayerProfile(keys.heads, keys.size, values.size, places[id(layout)])
        for (keys, values), layout in zip(attention.layer_outlines, attention.layouts, strict=True)
    )
    return ModelProfile(
        fingerprint=fingerprint,
        tokenizer=model.tokenizer.fingerprint,
        name=model.name,
        dtype=names[0],
        layers=layers,
        rotary=tuple(Rotary(one.pairing, tuple(one.frequencies.tolist())) for one in rotary),
        vocab_size=vocabulary_size(model.hf_model),
        max_positions=model.max_context_tokens,
        sink=sink,
        sink_ids=tuple(ids),
        block_tuned=model.is_block_tuned,
    )
