"""Miniatures: tiny random models of the architecture that a config describes.

A model's cache can only be measured on a model that runs. A miniature has the classes and the kinds
of layers of the original, and takes milliseconds to build, so that a model can be refused before
its weights are downloaded, and every architecture of transformers can be measured.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import AutoModel, DynamicCache, PreTrainedModel

from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model.kinds import ProbeError, refusal
from blockattn_rag.model.multimodal import auto_class, text_class
from blockattn_rag.model.probe import AttentionProfile, position_limit, profile_attention

logger = logging.getLogger("blockattn_rag")

VOCABULARY = 264
_HEADS, _KV_HEADS, _HEAD_SIZE, _WIDTH, _WINDOW = 4, 2, 16, 64, 16
_MOST_LAYERS = 12

# New values of numbers in a config, by patterns of their names. The first match counts. None keeps
# a number. Numbers are never increased.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (r"n_mamba_heads", None),
    (r"vocab_size.*|.*_vocab_size", VOCABULARY),
    (r"(num_|n_|swa_num_)(key_value|kv)_heads|num_query_groups", _KV_HEADS),
    (r"(mamba_n|mamba_num)_heads", 2 * _WIDTH // _HEAD_SIZE),
    (r"linear_num_(key|value)_heads", _KV_HEADS),
    (r"qk_head_dim", 2 * _HEAD_SIZE),
    (r".*head_?dim|.*d_head|dim_head|kv_channels|rotary_dim", _HEAD_SIZE),
    (r".*heads?", _HEADS),
    (r"mamba_d_ssm|attention_hidden_size", 2 * _WIDTH),
    (r"hidden_size_per_layer_input|.*_d_state|ssm_state_size|.*dt_rank", 8),
    (r".*lora_rank|adapter_rank|laurel_rank|.*_lowrank", 16),
    (
        r"hidden_size|n_embd|d_model|dim_model|.*embed_dim|word_embed_proj_dim|dim_model_base",
        _WIDTH,
    ),
    (r".*intermediate_size.*|.*ffn_(hidden_)?(size|dim)|.*hidden_size|d_ff|n_inner", 32),
    (r"(n|num)_.*expert_groups?|(n|topk)_groups?|mamba_n_?groups", 1),
    (r".*(experts|expert_num|moe_num_experts)", 4),
    (r".*experts?_per_tok(en)?|moe_topk|moe_k|.*top_k_experts", 2),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"sliding_window|sliding_window_size|.*chunk_size", _WINDOW),
    (r"ngram_vocab_size_base|split_ngram_parts", VOCABULARY),
)
_TYPES = ("layer_types", "layers_block_type")
_HEAD_COUNTS = ("num_attention_heads", "num_key_value_heads")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def miniature(config: Any) -> PreTrainedModel:
    """Build a tiny random model of a config's architecture, in float32 and in evaluation mode.

    Weights are spread, so that attention is far from uniform.

    Raises:
        Exception: the architecture cannot be built at such a size; its code may raise anything.
    """
    config = config.get_text_config(decoder=True)
    small = type(config).from_dict(shrunk(config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Some language models have no class of their own, only as a part of a multimodal model.
        auto: Any = auto_class(small) if text_class(small) else AutoModel
        model: PreTrainedModel = auto.from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2)
    return model.eval()


def check_architecture(config: Any) -> AttentionProfile | None:
    """Measure a miniature of an architecture, before the weights of a model are loaded.

    Returns:
        The miniature's profile. None if it cannot be built or run: the model itself is measured
        after it has been loaded.

    Raises:
        UnsupportedModelError: models of this architecture cannot run in block mode.
    """
    position_limit(config)
    try:
        model = miniature(config)
    except Exception as error:  # noqa: BLE001 -- the code of any architecture
        logger.info("Found no miniature of %s: %r", type(config).__name__, error)
        return None
    try:
        profile = profile_attention(model)
    except ProbeError as error:
        logger.info("The miniature of %s does not run: %s", type(config).__name__, error)
        return None
    _refuse_other_windows(model, profile)
    return profile


@torch.inference_mode()
def _refuse_other_windows(model: PreTrainedModel, profile: AttentionProfile) -> None:
    """Refuse a model whose sliding windows differ between a forward over a cache and one without.

    Only a miniature's windows are short enough for this test.
    """
    window = max((kind.window for kind in profile.kinds if kind.window), default=0)
    if not 0 < window <= 4 * _WINDOW:
        return
    cache, half = DynamicCache(config=model.config), window + 2
    ids = torch.arange(2 * half)[None] % VOCABULARY
    for part in ids.split(half, dim=1):
        positions = torch.arange(half)[None] + cache.get_seq_length()
        found = model(input_ids=part, position_ids=positions, past_key_values=cache)[0]
    if relative_error(found, model(input_ids=ids, use_cache=False)[0][:, half:]) > 1e-2:
        raise refusal(model, "its sliding windows have no effect in forwards without a cache")


def shrunk(config: Any) -> dict[str, Any]:
    """The fields of a config at a smaller size."""
    fields: dict[str, Any] = config.to_dict()
    name = next((n for n in _LAYERS if isinstance(fields.get(n), int)), None)
    types = next((t for n in _TYPES if (t := getattr(config, n, None))), ())
    layers = fields[name] if name else len(types)
    shared = fields.get("num_kv_shared_layers") or 0
    kept = _kept_layers(types, layers)
    if shared:
        fields["num_kv_shared_layers"] = kept
        kept *= 2
    small = {key: _smaller(key, value, layers, kept) for key, value in fields.items()}
    if name:
        small[name] = kept
    if all(fields.get(n) for n in _HEAD_COUNTS) and len({fields[n] for n in _HEAD_COUNTS}) == 1:
        small |= dict.fromkeys(_HEAD_COUNTS, _HEADS)
    for count, size in (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim")):
        if small.get(count) and small.get(size):
            small[count] = 2 * _WIDTH // small[size]
    if fields.get("qk_head_dim") and fields["qk_head_dim"] == fields.get("head_dim"):
        small["head_dim"] = small["qk_head_dim"]
    _fit_sections(small)
    return small


def _fit_sections(fields: dict[str, Any]) -> None:
    """Scale the sections of a multimodal rotary embedding to half of the rotated dimensions."""
    rope = fields.get("rope_parameters") or {}
    if sections := rope.get("mrope_section"):
        size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        half = int(size * rope.get("partial_rotary_factor", 1)) // 2
        scaled = [half * section // sum(sections) for section in sections]
        rope["mrope_section"] = [scaled[0] + half - sum(scaled), *scaled[1:]]


def _kept_layers(types: Sequence[str], layers: int) -> int:
    """How many of the first layers have every type of layer."""
    for count in range(2, len(types) + 1):
        if {*types[:count]} == {*types}:
            return min(count, _MOST_LAYERS)
    return min(layers, 3)


def _smaller(name: str, value: Any, layers: int, kept: int) -> Any:
    """A config's field at the smaller size."""
    if isinstance(value, Mapping):
        return {
            key: _smaller(key, one, layers, kept)
            for key, one in value.items()
            if not (str(key).isdigit() and int(key) >= kept)  # settings of single layers
        }
    if isinstance(value, (list, tuple)) and len(value) == layers > kept:
        value = value[:kept]
    if isinstance(value, (list, tuple)):
        return [_smaller(name, one, layers, kept) for one in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith("token_id"):
        return min(value, VOCABULARY - 1)
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return value if size is None else min(value, size)
    return value
