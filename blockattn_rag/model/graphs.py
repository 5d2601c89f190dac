"""CUDA graphs that replay the forward passes of single requests on a GPU.

For a few tokens, the kernel launch overhead exceeds the computation. A forward pass is captured
once for each number of tokens, rounded up to a power of two, and then replayed for contexts of any
length: everything that differs between requests is read from tensors (``DeviceRelay``).
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from blockattn_rag.attention.device_relay import DeviceRelay
from blockattn_rag.attention.relay import RelayPlan
from blockattn_rag.kv.context import Context
from blockattn_rag.model.caches import ContextCache, RelayCache, States
from blockattn_rag.model.kinds import PLAIN

MOST_TOKENS = 512
"""Maximum number of tokens in a captured forward pass. Longer passes hide the launch overhead."""

_LEAST_TOKENS = 16
"""Minimum number of tokens in a captured forward pass, except for decoding a single token."""

_ARGUMENTS = {
    *("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache"),
    *("logits_to_keep", "return_dict", "cache_position"),
}
"""Arguments of forward passes that can be captured."""

_logger = logging.getLogger(__name__)
Forward = Callable[..., Any]


class Recording(NamedTuple):
    """A captured computation. ``replay`` runs it again, and writes to ``result``."""

    replay: Callable[[], object]
    result: Tensor


def record(compute: Callable[[], Tensor], device: torch.device, pool: Any) -> Recording:
    """Run a computation on a GPU, capture it in a memory pool, and replay it to fill ``result``."""
    side: Any = torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        # The first run compiles kernels, and lets libraries allocate memory.
        compute()
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        # Other threads may use the device during the capture.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = compute()
    finally:
        torch.cuda.set_stream(current)  # A failed capture does not restore the stream.
    graph.replay()
    return Recording(graph.replay, result)


class _Inputs:
    """Inputs of a captured forward pass over ``tokens`` tokens. The last tokens may be padding."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        with torch.inference_mode(mode=False):
            self._ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
            self._positions = torch.zeros(1, tokens, dtype=torch.long, device=device)
            self._last = torch.zeros(1, dtype=torch.long, device=device)

    def fill(self, ids: Tensor, start: int) -> None:
        """Set the token ids ``[1, n]``, whose positions begin at ``start``."""
        tokens, width = ids.shape[1], self._ids.shape[1]
        self._ids[:, tokens:] = 0
        self._ids[:, :tokens] = ids
        # Padding repeats the last position: LongRoPE's frequencies depend on the largest one.
        torch.arange(start, start + width, out=self._positions[0])
        self._positions.clamp_(max=start + tokens - 1)
        self._last.fill_(tokens - 1)

    def arguments(self, cache: ContextCache) -> dict[str, Any]:
        return {
            "input_ids": self._ids,
            "position_ids": self._positions,
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": self._last,
        }


class GraphRunner:
    """Runs the forward passes of one request at a time over the blocks and tail of a
    ``DeviceRelay``. Replaces the model's ``forward``."""

    def __init__(self, hf_model: PreTrainedModel, relay: DeviceRelay) -> None:
        install(hf_model)
        self.relay = relay
        self.captures = True
        self._graphs: dict[int, tuple[_Inputs, Recording]] = {}
        self._pool: Any = None
        self._captured = GraphCache(Context(()), self)
        self._user: weakref.ref[GraphCache] | None = None
        self._address = relay.tail_address

    def cache_for(self, context: Context) -> GraphCache | None:
        """Create a cache over a context. None if the kernel cannot read the blocks."""
        return GraphCache(context, self) if self.relay.reads(context) else None

    def run(self, forward: Forward, cache: GraphCache, kwargs: dict[str, Any]) -> Any:
        """Run one forward pass over the cache. The caller must hold the model's lock."""
        ids: Tensor = kwargs["input_ids"]
        tokens = ids.shape[1]
        # The number of tokens in a captured forward pass is a power of two.
        width = 1 if tokens == 1 else max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
        is_captured = self.captures and width <= MOST_TOKENS and _is_plain(kwargs, tokens)
        device = self.relay.device
        # Triton launches kernels on the current device, which may differ from the relay's.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.begin(cache, width if is_captured else tokens)
            out = self._replayed(forward, cache, ids, width) if is_captured else None
            if out is None:
                out = forward(**kwargs)
        cache.tail_tokens += tokens
        return out

    def begin(self, cache: GraphCache, tokens: int) -> None:
        """Load a cache for ``tokens`` new tokens, and release the cache of the previous request."""
        previous = None if self._user is None else self._user()
        if previous is not cache:
            if previous is not None:
                previous.release()
            self._user = None
            self.relay.load(cache.context)
            self._user = weakref.ref(cache)
        self.relay.begin(cache.tail_tokens, tokens)
        if self.relay.tail_address != self._address:  # The existing graphs write to the old tail.
            self._graphs.clear()
            self._pool = None  # PyTorch frees a pool with its last graph.
            self._address = self.relay.tail_address

    def _replayed(self, forward: Forward, cache: GraphCache, ids: Tensor, width: int) -> Any:
        """Run a forward pass as a graph, captured on first use. None if it cannot be captured."""
        start = cache.get_seq_length()
        if width in self._graphs:
            inputs, recording = self._graphs[width]
            inputs.fill(ids, start)
            recording.replay()
        else:
            inputs = _Inputs(width, self.relay.device)
            inputs.fill(ids, start)
            arguments = inputs.arguments(self._captured)
            if self._pool is None and self.relay.device.type == "cuda":
                self._pool = torch.cuda.graph_pool_handle()
            try:
                recording = record(
                    lambda: forward(**arguments).logits, self.relay.device, self._pool
                )
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 -- for example a device synchronization
                self.captures = False
                _logger.warning("CUDA graphs are disabled, because a capture failed: %s", error)
                return None
            self._graphs[width] = inputs, recording
        return CausalLMOutputWithPast(logits=recording.result.clone(), past_key_values=cache)


class _SlotLayer(DynamicLayer):
    """Layer whose tail is in the relay's buffers. Its length includes the context."""

    def __init__(self, cache: GraphCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = weakref.proxy(cache), index

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Any:
        self._cache.relay.write(self._index, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        length: int = self._cache.context.num_tokens + self._cache.tail_tokens
        return length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.tail_tokens + query_length, self._cache.context.num_tokens


class GraphCache(ContextCache):
    """Cache of one request for a ``GraphRunner``. Its tail is empty at first."""

    def __init__(self, context: Context, runner: GraphRunner) -> None:
        super().__init__()
        self.context = context  # This reference keeps the blocks alive.
        self.runner: GraphRunner | None = runner
        self.attention = self.relay = runner.relay
        self.tail_tokens = 0
        self.layers = [_SlotLayer(self, index) for index in range(len(self.relay.layouts))]

    def release(self) -> None:
        """Switch from the runner to relay attention, which supports any forward pass."""
        if self.runner is None:
            return
        states, layouts = self.tail_states(self.tail_tokens), self.relay.layouts
        plan = RelayPlan([self.context], layouts, self.relay.device)
        plain = RelayCache(plan, self.layers, [PLAIN] * len(layouts))
        if states and self.tail_tokens:
            plain.append(states, self.tail_tokens)
        self.attention, self.layers, self.runner = plain.attention, plain.layers, None

    def crop(self, max_length: int) -> None:
        self.release()
        super().crop(max_length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.release()
        super().batch_repeat_interleave(repeats)

    def append(self, states: States, tokens: int) -> None:
        if self.runner is not None:
            self.runner.begin(self, tokens)
            self.tail_tokens += tokens
        super().append(states, tokens)

    def tail_states(self, tokens: int) -> States | None:
        if self.runner is None:
            return super().tail_states(tokens)
        first = self.tail_tokens - tokens
        layers = (self.relay.states(layer, self.tail_tokens) for layer in range(len(self.layers)))
        return [
            (keys[:, :, first:].clone(), values[:, :, first:].clone()) for keys, values in layers
        ]


def _is_plain(kwargs: dict[str, Any], tokens: int) -> bool:
    """Whether a forward pass has only ``_ARGUMENTS``, and needs only the last token's logits."""
    others = (value for name, value in kwargs.items() if name not in _ARGUMENTS)
    # Compare by identity, because a tensor of several elements has no truth value.
    asks_more = any(value is not None and value is not False for value in others)
    keep = kwargs.get("logits_to_keep", 0)
    return not asks_more and (tokens == 1 or (isinstance(keep, int) and keep == 1))


class _Forward:
    """Replacement for a model's ``forward``, which dispatches to the runner of a ``GraphCache``.
    ``own``: The ``forward`` that was set on the model. None: the method of its class."""

    def __init__(self, hf_model: PreTrainedModel, own: Forward | None) -> None:
        self._hf_model = weakref.ref(hf_model)
        self._own = own
        self.__signature__ = inspect.signature(own or hf_model.forward)

    def __reduce__(self) -> tuple[Any, ...]:
        """Wrap the copy's own ``forward`` when a model is copied or unpickled."""
        return _Forward, (self._hf_model(), self._own)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._own
        if forward is None:
            hf_model: Any = self._hf_model()
            forward = partial(type(hf_model).forward, hf_model)
        cache = kwargs.get("past_key_values")
        if isinstance(cache, GraphCache) and cache.runner is not None:
            given = {name for name, value in kwargs.items() if value is not None}
            has_ids = "input_ids" in given and given.isdisjoint({"inputs_embeds", "labels"})
            if has_ids and not args and not torch.is_grad_enabled():
                return cache.runner.run(forward, cache, kwargs)
            cache.release()
        return forward(*args, **kwargs)


def install(hf_model: PreTrainedModel) -> None:
    """Replace the model's ``forward``, so that a ``GraphCache`` is passed to its runner."""
    # `generate` of a PEFT model only runs the wrapped model.
    inner = next(one for one in hf_model.modules() if isinstance(one, PreTrainedModel))
    own = vars(inner).get("forward")
    if not isinstance(own, _Forward):
        vars(inner)["forward"] = _Forward(inner, own)
