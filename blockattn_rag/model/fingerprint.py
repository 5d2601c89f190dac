"""Identity of whatever decides a block's keys and values: weights, config, tokenizer, dtype."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
import xxhash
from transformers import PreTrainedModel

from blockattn_rag.tokenization import BlockTokenizer

KV_VERSION = 1
"""Raised whenever this package computes different keys and values for the same model and text."""

# Fields of a config that name, describe or steer generation, and so leave keys and values alone.
_NEUTRAL_FIELDS = frozenset(
    {
        *("_name_or_path", "architectures", "block_attention", "transformers_version"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range"),
        *("dtype", "torch_dtype", "attention_dropout", "hidden_dropout", "resid_pdrop"),
        *("output_attentions", "output_hidden_states", "return_dict", "problem_type"),
        *("id2label", "label2id", "chunk_size_feed_forward", "_attn_implementation"),
        "tie_word_embeddings",
    }
)


def model_fingerprint(hf_model: PreTrainedModel, tokenizer: BlockTokenizer) -> str:
    """64 hex digits. Two models share it only if they compute the same KV for the same text."""
    config = {k: v for k, v in hf_model.config.to_dict().items() if k not in _NEUTRAL_FIELDS}
    identity = {
        "kv_version": KV_VERSION,
        "config": config,
        "dtype": str(hf_model.dtype),
        "weights": weights_digest(hf_model),
        "tokenizer": tokenizer.fingerprint,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(hf_model: PreTrainedModel) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes of all parameters and buffers.

    Content, not name: a fine-tuned copy under the same name differs, a renamed copy does not. Not
    a cryptographic hash: it guards against mistakes at memory speed, not against an attacker, who
    could replace the model itself.
    """
    digest = xxhash.xxh3_128()
    seen: set[tuple[Any, ...]] = set()
    tensors = [*hf_model.named_parameters(), *hf_model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        # With the device: two GPUs may use one address for different weights.
        place = (tensor.device, tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if place in seen and tensor.numel():
            continue  # tied weights
        seen.add(place)
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}".encode())
        data = tensor.detach().to("cpu").contiguous().reshape(-1)
        digest.update(data.view(torch.uint8).numpy().data if data.numel() else b"")
    return digest.hexdigest()
