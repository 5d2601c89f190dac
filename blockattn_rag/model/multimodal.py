"""Language models of multimodal checkpoints, without the parts for images or sound."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model.probe import LOGITS, LOGITS_OF_OTHER_DTYPES, vocabulary_size

_TOKENS = 8


def auto_class(config: Any) -> Any:
    """Return the auto class that loads a config's model: for text only, or for images and text."""
    is_multimodal = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if is_multimodal and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def text_class(config: Any) -> type[PreTrainedModel] | None:
    mappings: Any = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    return next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)


def keep_settings(config: Any, text: Any) -> None:
    """Copy tuning and quantization settings from a multimodal config to its text config."""
    for name in ("block_attention", "quantization_config"):
        if (value := getattr(config, name, None)) is not None:
            setattr(text, name, value)


def language_model(loaded: PreTrainedModel) -> PreTrainedModel:
    """Extract the language model from a multimodal model, without the image and sound parts.

    Returns ``loaded`` itself if it is not multimodal, or if the language model has no class in
    transformers or computes different logits alone. Unused parts then stay in memory.
    """
    config: Any = loaded.config
    text = config.get_text_config(decoder=True)
    kind = text_class(text)
    if text is config or kind is None or isinstance(loaded, kind):
        return loaded
    try:
        alone = _alone(loaded, kind)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary_size(loaded), (1, _TOKENS), generator=generator)
        ids = ids.to(loaded.device)
        with torch.inference_mode():
            logits = [model(input_ids=ids).logits.float() for model in (alone, loaded)]
        error = relative_error(*logits)
    except (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
        return loaded  # Measure the complete model instead.
    return alone if error <= LOGITS.get(loaded.dtype, LOGITS_OF_OTHER_DTYPES) else loaded


def _alone(loaded: PreTrainedModel, kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Create a model of class ``kind`` with the decoder and the output layer of ``loaded``."""
    source: Any = loaded
    decoder = source.get_decoder()
    with torch.device("meta"):  # Meta tensors take no memory.
        alone: Any = kind(decoder.config)
    setattr(alone, alone.base_model_prefix, decoder)
    alone.set_output_embeddings(source.get_output_embeddings())
    if any(tensor.is_meta for tensor in alone.parameters()):
        raise ValueError(f"{kind.__name__} has weights that {type(loaded).__name__} lacks")
    alone.config.name_or_path = source.config.name_or_path
    keep_settings(source.config, alone.config)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        if hasattr(source, name):
            setattr(alone, name, getattr(source, name))
    alone.generation_config = source.generation_config
    model: PreTrainedModel = alone.eval()
    return model
