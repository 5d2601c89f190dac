"""ContextModel: creates caches over stored blocks, which are read in place or copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from blockattn_rag.attention.relay import RELAY_FINAL_TOKENS, LayerReads
from blockattn_rag.errors import UnsupportedModelError
from blockattn_rag.kv.context import Assembly, Context
from blockattn_rag.model import relay_attention
from blockattn_rag.model.caches import copied_cache
from blockattn_rag.model.checkpoint import TunedModel
from blockattn_rag.model.exclusion import lock_of
from blockattn_rag.model.graphs import GraphRunner
from blockattn_rag.model.probe import AttentionProfile, profile_attention
from blockattn_rag.model.states import HeadStates


class ContextModel(TunedModel):
    """Base class of ``BlockModel``: measures a model's attention, and creates its caches."""

    def __init__(self, hf_model: PreTrainedModel) -> None:
        self.hf_model = hf_model.eval()
        self.config: Any = hf_model.config
        self.lock = lock_of(hf_model)
        with self.lock:
            self.profile: AttentionProfile = profile_attention(hf_model)
            self._head_states = HeadStates(hf_model, self.profile.kinds)

    @property
    def device(self) -> torch.device:
        return self.hf_model.device

    @cached_property
    def supports_relay(self) -> bool:
        """Whether relay attention is exact for this model, tested on a short probe."""
        with self.lock:
            return relay_attention.relay_is_exact(self.hf_model, self.profile, self._layer_reads)

    @cached_property
    def _layer_reads(self) -> dict[int, LayerReads]:
        """Tensors of a block that each layer reads on the relay path, measured on first access."""
        with self.lock:
            return relay_attention.measured_reads(self.hf_model, self.profile)

    @cached_property
    def _is_plain(self) -> bool:
        with self.lock:
            return relay_attention.is_plain(self.hf_model, self.profile)

    @cached_property
    def has_causal_kernel(self) -> bool:
        """Whether the GPU's flash kernel is exact for copied contexts, tested on first access."""
        with self.lock:
            return self.supports_relay and relay_attention.causal_is_exact(
                self.hf_model, self.profile
            )

    @cached_property
    def graph_runner(self) -> GraphRunner | None:
        """Runner for single requests on a GPU. None if it is not supported or not exact."""
        if self.device.type != "cuda" or not self.supports_relay:
            return None
        with self.lock:
            return relay_attention.graph_runner(self.hf_model, self.profile)

    def choose_assembly(
        self, assembly: Assembly, final_tokens: int, contexts: Sequence[Context] = (Context(()),)
    ) -> Literal["relay", "copy"]:
        """Resolve ``assembly`` for a batch with final blocks of up to ``final_tokens`` tokens.
        Raises ``UnsupportedModelError`` for ``"relay"`` if the model does not support it."""
        if assembly == "relay" and not self.supports_relay:
            raise UnsupportedModelError(
                f"{self.name} cannot use assembly='relay', because it has "
                f"{relay_attention.OTHER_ATTENTION}: use assembly='copy' or 'auto'"
            )
        if assembly != "auto":
            return assembly
        if final_tokens > RELAY_FINAL_TOKENS or not self.supports_relay:
            return "copy"
        runner = self.graph_runner
        if len(contexts) > 1 or (runner is not None and all(map(runner.relay.reads, contexts))):
            return "relay"
        # Without the runner, relay would also concatenate the blocks, and launch more kernels.
        is_slower = self.device.type != "cpu" and not self._is_plain
        return "copy" if is_slower or self.has_causal_kernel else "relay"

    def cache_for(
        self, *contexts: Context, assembly: Literal["relay", "copy"] = "copy"
    ) -> DynamicCache | None:
        """Create a transformers cache with one context per row. The copy path pads on the left.

        Returns None if all contexts are empty, unless the ``graph_runner`` runs the final block.
        For a hybrid model, pass one context; the cache then has the states after its first block.
        """
        hf_model, profile = self.hf_model, self.profile
        runner = self.graph_runner if assembly == "relay" and len(contexts) == 1 else None
        cache: Any = runner and runner.cache_for(*contexts)
        if cache is None and not any(context.num_tokens for context in contexts):
            return None
        if cache is None and assembly == "relay":
            cache = relay_attention.relay_cache(hf_model, contexts, profile, self._layer_reads)
        elif cache is None:
            cache = copied_cache(hf_model.config, contexts, profile.layouts, profile.kinds)
            if len(contexts) == 1 and self.has_causal_kernel:
                cache.attention = relay_attention.CausalAttention()
        if cache.attention is not None:
            # Re-enable relay, because other code may have changed the model's attention.
            relay_attention.enable_relay(hf_model)
        if profile.has_states:
            (context,) = contexts
            with self.lock:
                self._head_states.start(cache, context.blocks[0].kv.token_ids.tolist())
        return cache
