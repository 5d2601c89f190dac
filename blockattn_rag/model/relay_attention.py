"""Relay attention for transformers: an attention function that models call by name.

Model code stays unchanged: the function is registered with transformers, and selected in the
model's config. It calls the ``ContextCache.attention`` of the running forward pass, if any, and
otherwise the model's original attention.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from blockattn_rag.attention.device_relay import DeviceRelay
from blockattn_rag.attention.kernels import AttentionInputs, attend_causal, takes_flash
from blockattn_rag.attention.latent import LatentMap
from blockattn_rag.attention.relay import JoinLimits, LayerReads, RelayPlan
from blockattn_rag.kv.context import Context, place
from blockattn_rag.kv.rope import relative_error
from blockattn_rag.model.caches import (
    CacheAttention,
    ContextCache,
    RelayCache,
    copied_cache,
    isolated_caches,
    note_caches,
    running_cache,
)
from blockattn_rag.model.encoding import EncodeRequest, encode_batch, logits_to_keep
from blockattn_rag.model.graphs import GraphRunner
from blockattn_rag.model.kinds import (
    PLAIN,
    LayerKind,
    SeenAttention,
    in_order,
    new_cache,
    own_attention,
    seen_attention,
    storing,
)
from blockattn_rag.model.probe import (
    LOGITS,
    LOGITS_OF_OTHER_DTYPES,
    AttentionProfile,
    check_ready,
    probe_cache,
    vocabulary_size,
)

OTHER_ATTENTION = "custom layers, masks or attention code"
"""Reasons why a model may not support relay attention, used in messages."""

_PREFIX = "blockattn_relay_"
_logger = logging.getLogger(__name__)


def enable_relay(hf_model: PreTrainedModel) -> None:
    """Make a model use the ``attention`` of the running ``ContextCache``, if it is set."""
    note_caches(hf_model)
    original = hf_model.config._attn_implementation
    if original.startswith(_PREFIX):
        return
    # Transformers would interpret a name with "flash" or a slash as one of its own kernels.
    name = _PREFIX + re.sub("flash|/", "_", original)
    AttentionInterface.register(name, _attention_function(original))
    AttentionMaskInterface.register(name, _mask_function(original))
    hf_model.set_attn_implementation(name)


class CausalAttention:
    """Plain causal attention over a copied cache, for one row without padding."""

    takes_mask = False

    def attend(self, _: int, inputs: AttentionInputs) -> Tensor:
        """See ``RelayPlan.attend``. ``inputs`` contain the keys and values of context and tail."""
        assert inputs.cap is None  # Checked by `is_plain`.
        assert inputs.sinks is None
        return attend_causal(inputs.query, inputs.key, inputs.value, inputs.scale)


def _running_attention() -> CacheAttention | None:
    cache = running_cache()
    own = None if cache is None else cache.attention
    # `CausalAttention` has no gradients. The model's original attention reads the same cache.
    return None if isinstance(own, CausalAttention) and torch.is_grad_enabled() else own


def _attention_function(original: str) -> Any:
    def relay_attention(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        own = _running_attention()
        if own is None:
            states = query, key, value, attention_mask
            return own_attention(original, module, *states, scaling=scaling, **kwargs)
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
        index: Any = module.layer_idx
        mask = tail_mask(attention_mask, query, key) if own.takes_mask else None
        cap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
        output = own.attend(index, AttentionInputs(query, key, value, scale, mask, cap, sinks))
        return output.transpose(1, 2).contiguous(), None

    return relay_attention


def _mask_function(original: str) -> Any:
    def relay_mask(*args: Any, **kwargs: Any) -> Any:
        own = _running_attention()
        if own is None:
            if original == "sdpa" and getattr(kwargs.get("config"), "num_kv_shared_layers", None):
                # Without a mask, transformers assumes causal attention for names other than "sdpa".
                # That is wrong if shared layers only compute the last tokens.
                kwargs["allow_is_causal_skip"] = False
            return ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
        return sdpa_mask(*args, **kwargs) if own.takes_mask else None

    return relay_mask


def tail_mask(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Convert transformers' mask of the tail (None: causal) to bool (None: all keys visible)."""
    if mask is not None:
        return mask if mask.dtype == torch.bool else mask >= 0
    rows, columns = query.shape[2], key.shape[2]
    if rows == 1:
        return None
    seen = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    return seen.tril(columns - rows).expand(query.shape[0], 1, rows, columns)


def last_logits(
    hf_model: PreTrainedModel,
    ids: Tensor,
    cache: DynamicCache | None,
    count: int,
    *,
    computes_all: bool = False,
) -> Tensor:
    """Logits ``[count, vocab]`` after each of the last ``count`` tokens of ``ids`` ``[1, n]``.

    ``ids``: Tokens to append to ``cache``, if any. ``computes_all``: See ``logits_to_keep``.
    """
    if isinstance(cache, ContextCache) and cache.takes_one_token and ids.shape[1] > 1:
        steps = [last_logits(hf_model, one, cache, 1) for one in ids.split(1, dim=1)]
        return torch.cat(steps[-count:])
    start = 0 if cache is None else cache.get_seq_length()
    # Pass positions, because some models count from 0 regardless of the cache.
    positions = torch.arange(start, start + ids.shape[1], device=hf_model.device)[None]
    with torch.inference_mode(), isolated_caches():
        out = hf_model(
            input_ids=ids.to(hf_model.device),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            **logits_to_keep(hf_model, count, computes_all=computes_all),
        )
    return out.logits[0, -count:]


def layer_windows(kinds: Sequence[LayerKind]) -> dict[int, int | None]:
    """Sliding windows in tokens (None: no window) by layer. Omits latent and state layers."""
    return {layer: window for layer, (_, window, _) in _reads(kinds, {}).items()}


def _reads(kinds: Sequence[LayerKind], latents: Mapping[int, LatentMap]) -> dict[int, LayerReads]:
    """Block tensors of each layer that attends to keys and values, or has a map in ``latents``."""
    places = {layer: place for place, layer in enumerate(storing(kinds))}
    reads = {}
    for index, kind in enumerate(kinds):
        source = index if kind.source is None else kind.source
        if kinds[source].is_attention or source in latents:
            window = kinds[source].window
            reads[index] = LayerReads(places[source], window, latents.get(source))
    return reads


def measured_reads(hf_model: PreTrainedModel, profile: AttentionProfile) -> dict[int, LayerReads]:
    """Find the block tensors that each layer reads, by layer index. Omits layers without attention,
    and layers that relay attention does not support.

    The linear maps of latent layers are measured by passing unit vectors through the layers.
    """
    kinds = profile.kinds
    outlines = dict(zip(storing(kinds), profile.layer_outlines, strict=True))
    ranks = {
        index: latents.size
        for index, (_, latents) in outlines.items()
        if kinds[index].attention == "latent" and not kinds[index].has_state
    }
    if not ranks:
        return _reads(kinds, {})
    check_ready(hf_model)
    cache, tokens = new_cache(hf_model.config), max(ranks.values())
    for index, outline in outlines.items():
        keys, values = (
            torch.zeros(1, heads, tokens, size, dtype=dtype, device=hf_model.device)
            for heads, size, dtype in outline
        )
        if index in ranks:
            values.diagonal(dim1=2, dim2=3).fill_(1)
        cache.update(*in_order(kinds[index], keys, values), index)
    with seen_attention(hf_model) as seen:
        last_logits(hf_model, torch.zeros(1, 1, dtype=torch.long), cache, 1)
    maps = {}
    for index, rank in ranks.items():
        if index in seen:
            rotary = outlines[index][0].size
            keys, values = (states[0, :, :rank] for states in seen[index][:2])
            maps[index] = LatentMap(keys[..., :-rotary].clone(), values.clone())
    return _reads(kinds, maps)


def relay_is_exact(
    hf_model: PreTrainedModel, profile: AttentionProfile, reads: Mapping[int, LayerReads]
) -> bool:
    """Enable relay attention, and test whether its logits match those of the copy path.

    Returns False without a test for models with layers, masks, soft caps or attention sinks that
    relay attention does not support, because a short probe might not reveal the difference.
    """
    kinds = profile.kinds
    if not all(index in reads or kind.attention == "none" for index, kind in enumerate(kinds)):
        return False
    seen = _seen(hf_model)
    # Older transformers releases cache nothing for shared layers, so these layers have no kind.
    if seen.keys() != reads.keys():
        return False
    for index, (_, window, _) in reads.items():
        is_unknown = seen[index].sees is None and not profile.has_windows
        if not (is_unknown or seen[index].has_window(window)):
            return False
    if _settings(hf_model) - {name for one in seen.values() for name in one.settings}:
        return False
    enable_relay(hf_model)

    def cache_for(context: Context) -> ContextCache:
        # Disable joining, so that these small blocks are read one by one.
        joins = JoinLimits(prefill_tokens=0, decode_tokens=0)
        return relay_cache(hf_model, [context], profile, reads, joins)

    return _equals_copies(hf_model, profile, cache_for)


def _settings(hf_model: PreTrainedModel) -> set[str]:
    """Names of the score settings in a model's config or weights; see ``SeenAttention``."""
    config = hf_model.config.get_text_config(decoder=True)
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    sinks = any(name.endswith("sinks") for name, _ in hf_model.named_parameters())
    return {name for name, has in (("softcap", capped), ("s_aux", sinks)) if has}


def _seen(hf_model: PreTrainedModel) -> dict[int, SeenAttention]:
    with torch.inference_mode(), seen_attention(hf_model) as seen:
        probe_cache(hf_model)
    return seen


def is_plain(hf_model: PreTrainedModel, profile: AttentionProfile) -> bool:
    """Whether all attention is full, without soft caps or sinks, as ``GraphRunner`` and
    ``CausalAttention`` require. Relay must be exact for the model."""
    kinds = (kind for kind in profile.kinds if kind.attention != "none")
    return all(kind == PLAIN for kind in kinds) and not any(
        layer.settings for layer in _seen(hf_model).values()
    )


def relay_cache(
    hf_model: PreTrainedModel,
    contexts: Sequence[Context],
    profile: AttentionProfile,
    reads: Mapping[int, LayerReads],
    joins: JoinLimits | None = None,
) -> RelayCache:
    """Create a cache that reads the contexts' blocks in place. State layers have no state yet."""
    plan = RelayPlan(contexts, profile.layouts, hf_model.device, joins=joins, layers=reads)
    return RelayCache(plan, new_cache(hf_model.config).layers, profile.kinds)


def graph_runner(hf_model: PreTrainedModel, profile: AttentionProfile) -> GraphRunner | None:
    """Create a runner for single requests, and test its logits against the model's own attention.

    Relay must be exact for the model. Returns None if the model or the GPU is not supported, or if
    the kernel fails or is not exact.
    """
    # States have a different address in each request, so graphs cannot use them.
    if profile.has_states or not is_plain(hf_model, profile):
        return None
    outlines = {states for layer in profile.layer_outlines for states in layer}
    outline, device = outlines.pop(), hf_model.device
    if outlines or not takes_flash(device, outline.dtype, outline.size):
        return None
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    runner = GraphRunner(hf_model, DeviceRelay(profile.layouts, outline, device, programs))
    # The larger sizes fill complete tiles of 64 tokens in the kernel, with a remainder.
    sizes = (7, 300, 70) if profile.max_context_tokens > 512 else (7, 7, 7)
    try:
        # The first run captures graphs, and the second run replays them.
        is_exact = all(
            _equals_copies(hf_model, profile, runner.cache_for, sizes, seed) for seed in range(2)
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- Triton raises compiler errors
        _logger.warning("The relay kernel is disabled, because a test run failed: %s", error)
        return None
    return runner if is_exact else None


def causal_is_exact(hf_model: PreTrainedModel, profile: AttentionProfile) -> bool:
    """Test whether the model's logits with ``attend_causal`` match those with its own attention.

    Relay must be exact for the model. Returns False if the kernel fails or is not supported.
    """
    sizes = {states.size for layer in profile.layer_outlines for states in layer}
    if len(sizes) > 1 or not takes_flash(hf_model.device, hf_model.dtype, *sizes):
        return False
    if not is_plain(hf_model, profile):
        return False

    def cache_for(context: Context) -> ContextCache:
        cache = copied_cache(hf_model.config, [context], profile.layouts, profile.kinds)
        cache.attention = CausalAttention()
        return cache

    try:
        return _equals_copies(hf_model, profile, cache_for)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # This GPU or PyTorch lacks the kernel.
        _logger.warning("Single requests use relay, because the flash kernel failed: %s", error)
        return False


def _equals_copies(
    hf_model: PreTrainedModel,
    profile: AttentionProfile,
    cache_for: Callable[[Context], ContextCache | None],
    sizes: tuple[int, int, int] = (7, 7, 7),
    seed: int = 2,
) -> bool:
    """Whether caches from ``cache_for`` give the same logits as the model's own attention over
    copied blocks, for two random blocks and a final block of ``sizes`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = vocabulary_size(hf_model)
    *blocks, final = (torch.randint(vocabulary, (n,), generator=generator) for n in sizes)
    requests = [EncodeRequest(ids.tolist(), str(index), "") for index, ids in enumerate(blocks)]
    context = place(encode_batch(hf_model, requests, "", profile))
    for tokens in sorted({len(final), 7, 1}, reverse=True):  # Lengths of prefill and decoding.
        copied = copied_cache(hf_model.config, [context], profile.layouts, profile.kinds)
        expected = last_logits(hf_model, final[None, :tokens], copied, 1)
        found = last_logits(hf_model, final[None, :tokens], cache_for(context), 1)
        budget = LOGITS.get(hf_model.dtype, LOGITS_OF_OTHER_DTYPES)
        if not relative_error(found.float(), expected.float()) <= budget:  # True for NaN.
            return False
    return True
