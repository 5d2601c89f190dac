"""Layer kinds, which describe the tensors that each layer of a model caches.

Kinds are measured when a model is loaded: from the caches and the attention inputs of its layers
in a short forward pass. Model names are not used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from blockattn_rag.errors import UnsupportedModelError

Attention = Literal["full", "windowed", "latent", "shared", "none"]

_WATCHED = "blockattn_watched"
_FAR = 1 << 30
_REFUSED = {
    "DynamicIndexedLayer": "sparse attention with an indexer, whose choice of tokens changes when "
    "a block moves"
}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Kind of a layer: the tensors that it caches.

    Args:
        attention: ``"full"`` or ``"windowed"``: keys and values. ``"latent"`` (multi-head latent
            attention): a rotary key, and the latent that keys and values are computed from, which
            the model caches in the opposite order. ``"shared"``: the layer attends to the keys and
            values of an earlier layer. ``"none"``: no attention.
        window: Sliding window in tokens. None: no window.
        has_state: Whether the layer has a recurrent or convolution state.
        source: Index of the layer whose keys and values a shared layer attends to. None: not a
            shared layer, or unknown.
    """

    attention: Attention = "full"
    window: int | None = None
    has_state: bool = False
    source: int | None = field(default=None, repr=False)  # Fingerprints contain the repr.

    @property
    def stores(self) -> bool:
        """Whether blocks store keys and values for this layer."""
        return self.attention in ("full", "windowed", "latent")

    @property
    def is_attention(self) -> bool:
        """Whether the layer caches its own keys and values, and nothing else."""
        return self.attention in ("full", "windowed") and not self.has_state

    def __str__(self) -> str:
        if self.attention == "none":
            return "state" if self.has_state else "no cache"
        name = "attention" if self.attention == "full" else f"{self.attention} attention"
        return f"{name} and state" if self.has_state else name


PLAIN = LayerKind()


def summary(kinds: Sequence[LayerKind]) -> str:
    """Number of layers of each kind, as text: ``24 state, 8 attention``."""
    names = [str(kind) for kind in kinds]
    return ", ".join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))


def storing(kinds: Sequence[LayerKind]) -> list[int]:
    return [index for index, kind in enumerate(kinds) if kind.stores]


def new_cache(config: Any) -> DynamicCache:
    """Create an empty cache that keeps all tokens, even those beyond sliding windows."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is LinearAttentionAndSlidingWindowAttentionLayer:
            states = layer.number_of_states
            cache.layers[index] = LinearAttentionAndFullAttentionLayer(number_of_states=states)
        elif type(layer) is DynamicSlidingWindowLayer:
            cache.layers[index] = DynamicLayer()
    return cache


class SeenAttention(NamedTuple):
    """Inputs of a layer's attention, recorded during a forward pass.

    Args:
        keys, values: Keys and values. Layers that share them have the same tensors.
        sees: Whether a query position attends to a key position. None: the mask is unknown.
        settings: Names of the score settings that the layer passes to attention: ``"softcap"``, and
            ``"s_aux"`` for attention sinks.
    """

    keys: Tensor
    values: Tensor
    sees: Callable[[int, int], bool] | None
    settings: frozenset[str]

    def has_window(self, window: int | None) -> bool:
        """Whether a token attends to exactly the last ``window`` tokens, including itself, or to
        all earlier tokens if ``window`` is None. False if the mask is unknown."""
        if self.sees is None:
            return False
        first = 0 if window is None else _FAR - window + 1
        return self.sees(_FAR, first) and (window is None or not self.sees(_FAR, first - 1))


@contextmanager
def seen_attention(hf_model: PreTrainedModel) -> Iterator[dict[int, SeenAttention]]:
    """Record the inputs of each layer's attention within the ``with`` block.

    Yields them by layer. Empty for models that do not use transformers' attention interface.
    """
    seen: dict[int, SeenAttention] = {}
    masks: list[tuple[Tensor, Any, Callable[[int, int], bool]]] = []
    original = hf_model.config._attn_implementation

    def attention(
        module: Any, query: Any, key: Tensor, value: Any, attention_mask: Any, **kwargs: Any
    ) -> Any:
        sees = None
        for made, own, function in masks if isinstance(attention_mask, Tensor) else ():
            place = attention_mask.untyped_storage().data_ptr()
            if made.untyped_storage().data_ptr() == place:  # The mask is `made`, or a view of it.
                attention_mask, sees = attention_mask if own is made else own, function
                break
        settings = frozenset(n for n in ("softcap", "s_aux") if kwargs.get(n) is not None)
        seen[module.layer_idx] = SeenAttention(key, value, sees, settings)
        return own_attention(original, module, query, key, value, attention_mask, **kwargs)

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        # Force masks to be built, because an omitted mask could not be matched to its layers.
        kwargs["allow_is_causal_skip"] = False
        own = ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
        if "mask_function" not in kwargs:
            return own
        # Flash and flex attention build no mask tensor, so build one to match it to layers.
        made: Any = own if isinstance(own, Tensor) else sdpa_mask(*args, **kwargs)
        visible = kwargs["mask_function"]
        masks.append((made, own, lambda *at: bool(visible(*map(torch.tensor, (0, 0, *at))))))
        return made

    AttentionInterface.register(_WATCHED, attention)
    AttentionMaskInterface.register(_WATCHED, make_mask)
    hf_model.set_attn_implementation(_WATCHED)
    try:
        yield seen
    finally:
        hf_model.set_attn_implementation(original)


class _Changed:
    """View of an object that overrides some of its attributes."""

    def __init__(self, original: Any, **values: Any) -> None:
        vars(self).update(values, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def own_attention(name: str, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a module's attention with transformers' implementation ``name``, regardless of the
    model's current config."""
    # For ``eager``, transformers calls a function in the model's own source file.
    eager: Any = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    forward = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if "flash" in name:  # Flash attention imports the package named in the config.
        module = _Changed(module, config=_Changed(module.config, _attn_implementation=name))
    return forward(module, *args, **kwargs)


def measured_kinds(
    hf_model: PreTrainedModel, filled: DynamicCache, seen: Mapping[int, SeenAttention]
) -> list[LayerKind]:
    """Derive the kinds of a model's layers from a forward pass.

    Raises ``UnsupportedModelError`` if block mode does not support a layer.

    Args:
        filled: A ``new_cache`` after the forward pass.
        seen: Result of ``seen_attention`` for the forward pass.
    """
    config: Any = hf_model.config
    names = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    own_layers = DynamicCache(config=config).layers
    kinds = []
    for index, (layer, own) in enumerate(zip(filled.layers, own_layers, strict=True)):
        if index < len(names) and "chunked" in names[index]:
            raise refusal(
                hf_model,
                f"the attention of layer {index} is chunked: a token attends only to its own "
                "chunk, so its keys and values change when its block moves",
            )
        window = getattr(own, "sliding_window", None)
        kinds.append(_measured(hf_model, index, layer, window, seen))
    if not any(kind.stores for kind in kinds):
        found = summary(kinds) if kinds else "no layer with a cache"
        raise refusal(
            hf_model,
            f"it has no attention layer with keys and values (found {found}), so there is nothing "
            "to store for a passage",
        )
    return kinds


def _measured(
    hf_model: PreTrainedModel,
    index: int,
    layer: Any,
    window: int | None,
    seen: Mapping[int, SeenAttention],
) -> LayerKind:
    """Derive a layer's kind from its cache, its window, and the keys that it attends to."""
    keys = seen[index].keys if index in seen else None
    known = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)
    keeps = getattr(layer, "keys", None) is not None and getattr(layer, "values", None) is not None
    if type(layer) in known:
        has_state = isinstance(layer, LinearAttentionLayer) and bool(states_of(layer))
        if keeps:
            attention: Attention = "full" if window is None else "windowed"
            # Keys that differ in size from the cached keys are computed from cached latents.
            if keys is not None and keys.shape[-1] != layer.keys.shape[-1]:
                attention = "latent"
            return LayerKind(attention, window, has_state)
        if has_state:
            return LayerKind("none", has_state=True)
    elif keeps or type(layer).__name__ != "DummyLayer":  # Transformers 5.19 lacks the class.
        name = type(layer).__name__
        about = _REFUSED.get(name, f"a cache of the type {name}, which is not supported")
        raise refusal(hf_model, f"layer {index} has {about}")
    if keys is None:
        return LayerKind("none")
    source = next(place for place, one in seen.items() if one.keys is keys)
    return LayerKind("shared", source=source if source != index else None)


def states_of(layer: LinearAttentionCacheLayerMixin) -> list[Tensor]:
    """Return the convolution and recurrent states that are set in a layer of a cache."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


def layer_states(
    cache: DynamicCache, kinds: Sequence[LayerKind]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over keys and values ``[batch, heads, tokens, size]`` (in latent layers, rotary keys
    and latents) of the layers that store them."""
    layers: Any = cache.layers
    for layer, kind in zip(layers, kinds, strict=True):
        if kind.stores:
            yield in_order(kind, layer.keys, layer.values)


def in_order(kind: LayerKind, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Convert between the orders of a cache and a block, which only differ for latent layers."""
    return (values, keys) if kind.attention == "latent" else (keys, values)


class ProbeError(UnsupportedModelError):
    """A model cannot run the forward passes that measure its attention."""


def refusal(
    subject: object, reason: str, kind: type[UnsupportedModelError] = UnsupportedModelError
) -> UnsupportedModelError:
    return kind(
        f"{type(subject).__name__} cannot be used with Block-Attention: {reason}. The page "
        "'Models' of the documentation lists models that work, such as Qwen3, Llama 3 and Gemma 3."
    )
