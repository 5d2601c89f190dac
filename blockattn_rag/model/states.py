"""States of hybrid models, from which state layers continue with the final block.

A state layer has no keys and values that could be concatenated. In block mode, the final block
starts from the state after the head, which is the prompt's first block. The states after recent
heads are kept in memory, and shared by all requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from blockattn_rag.model.caches import ContextCache
from blockattn_rag.model.encoding import logits_to_keep
from blockattn_rag.model.kinds import LayerKind, new_cache, refusal, states_of
from blockattn_rag.model.probe import check_ready, probe_cache
from blockattn_rag.model.relay_attention import last_logits

MOST_BYTES = 1 << 29
"""Maximum size in bytes of a model's cached states. The least recently used states are evicted
first. The states of one head are kept regardless of their size."""

_FIELDS = (*vars(LinearAttentionLayer()),)


class HeadStates:
    """Cache of the states after the heads of recent prompts. Callers must hold the model's lock."""

    def __init__(self, hf_model: PreTrainedModel, kinds: Sequence[LayerKind]) -> None:
        self._hf_model = hf_model
        self._indices = [index for index, kind in enumerate(kinds) if kind.has_state]
        self._kept: OrderedDict[tuple[int, ...], list[Any]] = OrderedDict()

    @cached_property
    def _takes_several_tokens(self) -> bool:
        """Whether a forward pass of several tokens continues from a cache's states.

        Some transformers models only use the state in forward passes of one token. The test
        replaces the state: if the logits change, the state is used. One layer is tested, because
        all state layers of a model work alike.
        """
        layer, names = self._indices[-1], ("conv_states", "recurrent_states")
        one, several = (
            all(_is_used(self._hf_model, layer, name, tokens) for name in names)
            for tokens in (1, 2)
        )
        if not one:
            reason = f"later tokens do not continue from the state of layer {layer}"
            raise refusal(self._hf_model, reason)
        return several

    def __len__(self) -> int:
        return len(self._kept)

    def start(self, cache: ContextCache, head_ids: Sequence[int]) -> None:
        """Initialize a cache with copies of the states after a head."""
        head = tuple(head_ids)
        if head not in self._kept:
            self._kept[head] = self._computed(head)
            while self._size() > MOST_BYTES and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(head)
        cache.takes_one_token = not self._takes_several_tokens
        with torch.inference_mode(mode=False):
            # Later forward passes outside of inference mode must be able to write to the copies.
            for index, state in zip(self._indices, self._kept[head], strict=True):
                _copy(state, cache.layers[index])

    def _computed(self, head: Sequence[int]) -> list[Any]:
        check_ready(self._hf_model)
        cache = new_cache(self._hf_model.config)
        with torch.inference_mode():
            self._hf_model(
                input_ids=torch.tensor([head], device=self._hf_model.device),
                past_key_values=cache,
                use_cache=True,
                **logits_to_keep(self._hf_model),
            )
        states = []
        for index in self._indices:  # Copy states, but not the layer's keys and values.
            states.append(LinearAttentionLayer())
            _copy(cache.layers[index], states[-1])
        return states

    def _size(self) -> int:
        layers = (layer for states in self._kept.values() for layer in states)
        return sum(state.nbytes for layer in layers for state in states_of(layer))


@torch.inference_mode()
def _is_used(hf_model: PreTrainedModel, layer: int, name: str, tokens: int) -> bool:
    """Whether a state affects the logits of the next tokens. True if there is no such state."""
    logits = []
    # Try several values: large states may decay to 0, and some kernels and experts drop NaN.
    for factor in (0, 100, torch.nan):
        cache: Any = probe_cache(hf_model)
        states = getattr(cache.layers[layer], name)
        if all(state is None for state in states.values()):
            return True
        for index, state in states.items():
            states[index] = torch.full_like(state, factor)
        ids = torch.zeros(1, tokens, dtype=torch.long, device=hf_model.device)
        logits.append(last_logits(hf_model, ids, cache, 1))
    return not all(torch.equal(logits[0], other) for other in logits[1:])


def _copy(source: Any, target: Any) -> None:
    """Copy the states of a cache layer, but not its keys and values."""
    for name in _FIELDS:
        value = getattr(source, name)
        if isinstance(value, dict):
            value = {n: one.clone() if isinstance(one, Tensor) else one for n, one in value.items()}
        setattr(target, name, value)
