"""Recomputes tokens of a loaded context, with a worker's model and pages.

As in ``model.recompute``, a first forward pass over the question measures which tokens it attends
to most. A second pass recomputes these tokens with full attention and writes them to the pages.
Neither pass uses vLLM's attention backend, which supports only consecutive tokens.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention

from blockattn_rag.attention.kernels import AttentionInputs
from blockattn_rag.errors import ServingError
from blockattn_rag.model.chosen_attention import ChosenAttention, MeasuredAttention
from blockattn_rag.model.recompute import choose_tokens, measured_layers
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.vllm.pages import LayerPages, States, joined

GetStates = Callable[[int, Tensor, Tensor], States]
"""Function that returns all keys and values that a forward pass attends to in a layer. Its
arguments are the layer index, and the keys and values of the tokens in the pass."""


class Recomputer:
    """Recomputes tokens in requests' pages. ``pages``: Pages of all attention layers, in order."""

    def __init__(self, pages: Sequence[LayerPages], engine: VllmConfig) -> None:
        layers = [layer_pages.layer for layer_pages in pages]
        for index, layer in enumerate(layers):
            has_slopes = getattr(layer.impl, "alibi_slopes", None) is not None
            if type(layer) is not Attention or has_slopes:
                raise ServingError(
                    f"Tokens cannot be recomputed because layer {index} has an unsupported type of "
                    f"attention ({type(layer).__name__}); use a recipe with recompute=0, such as "
                    "'fast'"
                )
        self._layers, self._pages, self._engine = layers, pages, engine
        self._model = _model_of(layers[0])
        self._windows = {index: layer.sliding_window for index, layer in enumerate(layers)}
        self._most_tokens = engine.scheduler_config.max_num_batched_tokens

    @torch.inference_mode()
    def recompute(
        self, token_ids: Sequence[int], slots: Tensor, plan: BlockPlan, count: int
    ) -> list[int]:
        """Recompute ``count`` tokens of a prompt's context in its slots ``[tokens]``, which must
        not be shared with other requests. Returns the sorted indices of these tokens, which are
        identical on all ranks."""
        received = self._received(token_ids[len(slots) :], slots)
        chosen = choose_tokens(received, plan.lengths, plan.may_change, count)
        self._compute(token_ids, slots, chosen)
        return chosen

    def _received(self, final_ids: Sequence[int], slots: Tensor) -> Tensor:
        """Measure the attention of the final block to each context token, ``[tokens]``."""
        before, layers = len(slots), measured_layers(self._windows)
        received = torch.zeros(before, dtype=torch.float32, device=slots.device)
        earlier: dict[int, States] = {}
        for start in range(0, len(final_ids), self._most_tokens):
            ids = final_ids[start : start + self._most_tokens]

            def states(layer: int, keys: Tensor, values: Tensor) -> States:
                own = keys, values
                if layer in earlier:
                    own = joined([earlier[layer], own])
                if len(final_ids) > self._most_tokens:
                    earlier[layer] = own
                return joined([self._pages[layer].read(slots), own])

            measured = MeasuredAttention(
                before + start, len(ids), self._windows, layers, slots.device
            )
            places = torch.arange(len(ids), device=slots.device) + before + start
            self._run(ids, places, measured, states)
            received += measured.total[:before] * len(ids)
        group = get_tp_group()
        if group.world_size > 1:  # Each rank has measured only its own heads.
            received = group.broadcast(group.all_reduce(received))
        return received

    def _compute(self, token_ids: Sequence[int], slots: Tensor, chosen: Sequence[int]) -> None:
        """Replace the keys and values of the chosen tokens, in chunks. Later tokens attend to the
        new keys and values of earlier tokens, so the result does not depend on the chunk size."""
        for start in range(0, len(chosen), self._most_tokens):
            part = chosen[start : start + self._most_tokens]
            places = torch.tensor(part, device=slots.device)

            def states(
                layer: int, keys: Tensor, values: Tensor, part: Any = part, places: Any = places
            ) -> States:
                self._pages[layer].write(keys, values, slots[places])
                return self._pages[layer].read(slots[: part[-1] + 1])

            attention = ChosenAttention(part, places, self._windows, has_causal_kernel=False)
            self._run([token_ids[place] for place in part], places, attention, states)

    def _run(
        self, ids: Sequence[int], places: Tensor, attention: ChosenAttention, states: GetStates
    ) -> None:
        with (
            _attending(self._layers, attention, states),
            set_forward_context(None, self._engine, num_tokens=len(ids), skip_compiled=True),
        ):
            self._model(
                input_ids=torch.tensor(ids, dtype=torch.int32, device=places.device),
                positions=places,
                intermediate_tensors=None,
                inputs_embeds=None,
            )


@dataclass(eq=False)
class _Attention:
    """Replacement for a layer's attention backend (``AttentionImpl``)."""

    _index: int
    _backend: Any
    _attention: ChosenAttention
    _states: GetStates

    def __getattr__(self, name: str) -> Any:
        """Delegate other attributes, such as ``do_kv_cache_update``, to the backend."""
        return getattr(self._backend, name)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: None,
        output: Tensor,
        **_: Any,
    ) -> Tensor:
        """See ``AttentionImpl.forward``. States have the shape ``[tokens, heads, head_size]``."""
        keys, values = self._states(self._index, key.transpose(0, 1), value.transpose(0, 1))
        backend = self._backend
        inputs = AttentionInputs(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            backend.scale,
            cap=getattr(backend, "logits_soft_cap", None) or None,
            sinks=getattr(backend, "sinks", None),
        )
        attended = self._attention.attend(self._index, inputs)
        output.copy_(attended[0].transpose(0, 1))
        return output


@contextmanager
def _attending(
    layers: Sequence[Any], attention: ChosenAttention, states: GetStates
) -> Iterator[None]:
    backends = [layer.impl for layer in layers]
    try:
        for index, (layer, backend) in enumerate(zip(layers, backends, strict=True)):
            layer.impl = _Attention(index, backend, attention, states)
        yield
    finally:
        for layer, backend in zip(layers, backends, strict=True):
            layer.impl = backend


def _model_of(layer: nn.Module) -> nn.Module:
    """Find the language model that contains a layer. vLLM does not pass it to connectors."""
    models = [
        found
        for found in gc.get_objects()
        if issubclass(type(found), nn.Module)
        and hasattr(type(found), "compute_logits")
        and any(module is layer for module in found.modules())
    ]
    if not models:
        raise ServingError(
            "Tokens cannot be recomputed because the worker's model was not found; use a recipe "
            "with recompute=0, such as 'fast'"
        )
    return min(models, key=lambda model: len([*model.modules()]))
