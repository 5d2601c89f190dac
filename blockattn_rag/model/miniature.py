"""Miniatures: tiny random models with the architecture that a config describes.

A cache can only be measured by running a model. A miniature has the same classes and kinds of
layers as the original, and takes milliseconds to build. With miniatures, unsupported models can be
rejected before their weights are downloaded, and architectures can be measured without weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
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

# Patterns of config fields, and their values in a miniature. The first match applies. None keeps
# the original value. Values are never increased.
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
    """Build a tiny random model with a config's architecture, in float32 and evaluation mode.

    Weights have a large variance, so that attention is far from uniform. If the architecture cannot
    be built at this size, model code may raise any exception.
    """
    config = config.get_text_config(decoder=True)
    return _built(config, shrunk(config))


def _built(config: Any, fields: dict[str, Any]) -> PreTrainedModel:
    small = type(config).from_dict({**fields, "quantization_config": None})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # Some language models have no causal class of their own, but only a multimodal one.
        auto: Any = auto_class(small) if text_class(small) else AutoModel
        model: PreTrainedModel = auto.from_config(small, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2)
    return model.eval()


def check_architecture(config: Any) -> AttentionProfile | None:
    """Measure a miniature of an architecture before a model's weights are loaded.

    Returns the miniature's profile. None if it cannot be built or run: the model itself must then
    be measured after loading. Raises ``UnsupportedModelError`` if models of this architecture
    cannot run in block mode.
    """
    position_limit(config)
    try:
        model = miniature(config)
    except Exception as error:  # noqa: BLE001 -- model code may raise anything
        logger.info("Cannot build a miniature of %s: %r", type(config).__name__, error)
        return None
    try:
        profile = profile_attention(model)
    except ProbeError as error:
        logger.info("Cannot run the miniature of %s: %s", type(config).__name__, error)
        return None
    _refuse_other_windows(model, profile)
    return profile


def profile_config(config: Any, dtype: torch.dtype) -> AttentionProfile:
    """Measure what a model with keys and values in ``dtype`` caches, from its config.

    Runs a narrow model on the CPU that has all layers, the head sizes and the rotary embeddings of
    the original. This takes seconds and a few hundred megabytes for a model of any size. For a
    hybrid model, returns the profile of a miniature. Raises ``UnsupportedModelError`` if models of
    this architecture cannot run in block mode, or cannot be measured without weights.
    """
    config = config.get_text_config(decoder=True)
    sketch = check_architecture(config)
    if sketch is not None and sketch.has_states:
        return sketch  # Servers reject models with states, so only the kinds are used.
    try:
        size = _head_size(config)
    except (AttributeError, TypeError, ZeroDivisionError) as error:
        raise refusal(
            config, f"its config lacks the head size that a server requires ({error!r})"
        ) from error
    reasons = []
    # Some models compute the head size from the width, and ignore the config's value.
    for scale in (None, size):
        try:
            fields = _thinned(config, scale)
            with torch.device("cpu"):
                profile = profile_attention(_built(config, fields))
        except Exception as error:  # noqa: BLE001 -- model code may raise anything
            reasons.append(repr(error))
            continue
        if any(keys.size == size for keys, _ in profile.layer_outlines):
            heads = {} if scale is None else _head_counts(config, fields)
            outline = [(heads.get(n, n), width, dtype) for n, width, _ in profile.token_outline]
            return replace(profile, token_outline=tuple(outline))
        reasons.append(f"found head size {profile.layer_outlines[0][0].size}, expected {size}")
    raise refusal(
        config, f"its layers cannot be measured without its weights ({'; '.join(reasons)})"
    )


def _head_size(config: Any) -> int:
    """Size of the keys of one layer. In latent attention, the size of its rotary keys."""
    fields = config.to_dict()  # Attributes that differ between layers cannot be read.
    size = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    size = size or getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _head_counts(config: Any, small: Mapping[str, Any]) -> dict[int, int]:
    """Map the numbers of heads in a smaller config to those in the original config."""
    counts: dict[int, int] = {1: 1}
    for name in _HEAD_COUNTS:
        if isinstance(count := getattr(config, name, None), int):
            counts.setdefault(small[config.attribute_map.get(name, name)], count)
    return counts


@torch.inference_mode()
def _refuse_other_windows(model: PreTrainedModel, profile: AttentionProfile) -> None:
    """Reject a model whose sliding windows differ between forward passes with and without a cache.
    Only the windows of miniatures are short enough for this test."""
    window = max((kind.window for kind in profile.kinds if kind.window), default=0)
    if not 0 < window <= 4 * _WINDOW:
        return
    cache, half = DynamicCache(config=model.config), window + 2
    ids = torch.arange(2 * half)[None] % VOCABULARY
    for part in ids.split(half, dim=1):
        positions = torch.arange(half)[None] + cache.get_seq_length()
        found = model(input_ids=part, position_ids=positions, past_key_values=cache)[0]
    if not relative_error(found, model(input_ids=ids, use_cache=False)[0][:, half:]) <= 1e-2:
        raise refusal(model, "its sliding windows have no effect in forward passes without a cache")


def shrunk(config: Any) -> dict[str, Any]:
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
    """Scale a multimodal rotary embedding's sections to cover half of the rotated dimensions."""
    rope = fields.get("rope_parameters") or {}
    if sections := rope.get("mrope_section"):
        size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        half = int(size * rope.get("partial_rotary_factor", 1)) // 2
        scaled = [half * section // sum(sections) for section in sections]
        rope["mrope_section"] = [scaled[0] + half - sum(scaled), *scaled[1:]]


_HEADS_OR_GROUPS = r".*heads?|num_query_groups"
_CACHED = re.compile(
    rf"{_HEADS_OR_GROUPS}|.*head_?dim|.*d_head|dim_head|kv_channels|rotary_dim|kv_lora_rank"
    r"|sliding_window|sliding_window_size|.*chunk_size|.*layers?|.*_period|.*_interval"
)
"""Config fields that determine what attention caches."""
_WIDTHS = re.compile(r"hidden_size|n_embd|d_model|dim_model|.*embed_dim|word_embed_proj_dim")
_ALL = 1 << 30


def _thinned(config: Any, size: int | None = None) -> dict[str, Any]:
    """Fields of a config for a narrow model with all layers.

    ``size``: Head size, for models that compute it from the width. The model then has fewer heads.
    Default: the config's head size, with all key heads.
    """
    small = {name: _thinned_field(name, value) for name, value in config.to_dict().items()}
    queries, keys = (config.attribute_map.get(name, name) for name in _HEAD_COUNTS)
    if size is not None:
        few = shrunk(config)
        small |= {name: few[name] for name in small if re.fullmatch(_HEADS_OR_GROUPS, name)}
    elif isinstance(count := small.get(keys), int) and count and small[queries] % count == 0:
        small[queries] = count  # Query heads do not affect the cache.
    width = small[queries] * (size or max(2, _WIDTH // small[queries] // 2 * 2))
    return {
        name: width if isinstance(value, int) and _WIDTHS.fullmatch(name) else value
        for name, value in small.items()
    }


def _thinned_field(name: str, value: Any) -> Any:
    """Value of a config field, reduced unless the field determines what attention caches."""
    if name == "per_layer_config" and isinstance(value, Mapping):
        return {
            layer: {field: _thinned_field(field, own) for field, own in fields.items()}
            for layer, fields in value.items()
        }
    return value if _CACHED.fullmatch(name) else _smaller(name, value, _ALL, _ALL)


def _kept_layers(types: Sequence[str], layers: int) -> int:
    """Number of leading layers that include every layer type, at most ``_MOST_LAYERS``."""
    complete = (n for n in range(2, len(types) + 1) if {*types[:n]} == {*types})
    return min(next(complete, min(layers, 3)), _MOST_LAYERS)


def _smaller(name: str, value: Any, layers: int, kept: int) -> Any:
    if isinstance(value, Mapping):
        return {
            key: _smaller(key, one, layers, kept)
            for key, one in value.items()
            if not (str(key).isdigit() and int(key) >= kept)  # The keys are layer indices.
        }
    if isinstance(value, (list, tuple)) and len(value) == layers > kept:
        value = value[:kept]
    if isinstance(value, (list, tuple)):
        return [_smaller(name, one, layers, kept) for one in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith("token_id"):
        return min(value, VOCABULARY - 1)
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), None)
    return value if size is None else min(value, size)
