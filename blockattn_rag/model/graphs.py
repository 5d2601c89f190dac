"""CUDA graphs: a question's forward without the Python around it.

On a GPU the kernels of a short forward take less time than Python needs to start them. A CUDA graph
starts hundreds of kernels at once, but always the same ones on the same memory, while every prompt
has blocks of its own. So the forward is recorded in pieces, cut at every attention: what lies
between two attentions is replayed, and relay attention runs in between as it always does. Questions
are padded on the right to a few lengths, the buckets, each of which is recorded once.

*Tested with a recorder of the CPU in the place of ``attention.cuda.CudaRecorder``; not run on a GPU
yet.*
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from blockattn_rag.attention.cuda import CudaRecorder
from blockattn_rag.attention.tuning import ACCELERATOR
from blockattn_rag.model.caches import RelayCache
from blockattn_rag.model.relay_attention import enable_relay, tail_mask
from blockattn_rag.model.running_cache import running_with

logger = logging.getLogger("blockattn_rag")

BUCKETS = ACCELERATOR.graph_tokens
"""Tokens of a recorded forward; longer ones are run as ever."""

Replay = Callable[[], object]


class Recorder(Protocol):
    """Records what a device is told to do, in pieces."""

    def session(self) -> AbstractContextManager[Any]:
        """Surrounds the pieces of one forward."""

    def begin(self) -> None:
        """From here on, record."""

    def end(self) -> Replay:
        """Stop, and give what does it all again on the same memory."""


class _DryRun:
    """Records nothing, for a first forward, in which libraries set themselves up."""

    def session(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self) -> None:
        """Nothing to do."""

    def end(self) -> Replay:
        return self.begin


class _Piece(NamedTuple):
    """What leads to one layer's attention: ``replay`` fills ``query``, ``key`` and ``value``
    ``[1, heads, bucket, size]``; the next piece reads ``output``, like the query."""

    replay: Replay
    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    output: Tensor


class _Cutter:
    """Takes the place of a relay plan, and cuts the record at every attention."""

    num_tokens = 0

    def __init__(self, recorder: Recorder, num_layers: int) -> None:
        self.num_layers = num_layers
        self._recorder = recorder
        self.pieces: list[_Piece] = []
        recorder.begin()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, _: object
    ) -> Tensor:
        replay = self._recorder.end()
        output = query.new_zeros(*query.shape[:3], value.shape[3])
        self.pieces.append(_Piece(replay, layer, query, key, value, scale, output))
        self._recorder.begin()
        return output


class _NoCache(RelayCache):
    """Keeps nothing: attention is not part of the record."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return key_states, value_states


class _Recorded:
    """A model's forward over up to ``bucket`` tokens of one request.

    Args:
        forward: the model's own.
        num_layers: of the model.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        num_layers: int,
        bucket: int,
        recorder: Recorder,
        device: torch.device,
    ) -> None:
        self._ids = torch.zeros(1, bucket, dtype=torch.long, device=device)
        self._positions = torch.zeros(1, bucket, dtype=torch.long, device=device)
        self._last = torch.zeros(1, dtype=torch.long, device=device)
        cutter: Any = _Cutter(recorder, num_layers)
        cache = _NoCache(cutter)
        with running_with(cache):
            out = forward(
                input_ids=self._ids,
                position_ids=self._positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=self._last,
            )
        self._pieces = cutter.pieces
        self._finish = recorder.end()
        self._logits: Tensor = out.logits

    def __call__(self, ids: Tensor, positions: Tensor, cache: RelayCache) -> Tensor:
        """Logits ``[1, 1, vocabulary]`` after ``ids`` ``[1, n]``, which the cache takes in."""
        count = ids.shape[1]
        self._ids[:, :count] = ids
        self._positions[:, :count] = positions
        self._last.fill_(count - 1)
        for piece in self._pieces:
            piece.replay()
            # Real tokens only: padding lies behind them, where no real token looks.
            query, key, value = (s[:, :, :count] for s in (piece.query, piece.key, piece.value))
            keys, values = cache.update(key, value, piece.layer)
            mask = tail_mask(None, query, keys)
            output = cache.attention.attend(piece.layer, query, keys, values, piece.scale, mask)
            piece.output[:, :, :count] = output
        self._finish()
        return self._logits.clone()


class GraphedForward:
    """A model's ``forward`` that replays records where it can, and else is the model's own.

    Args:
        hf_model: of one device, ready for relay attention.
        recorder: of that device.
    """

    def __init__(self, hf_model: PreTrainedModel, recorder: Recorder) -> None:
        self._original = hf_model.forward
        self._device = hf_model.device
        self._name = type(hf_model).__name__
        self.__signature__ = inspect.signature(hf_model.forward)  # transformers looks at it
        self._recorder = recorder
        self._recorded: dict[int, _Recorded] = {}
        self._works = True
        # Engines that share the model share the memory of its records.
        self._lock = threading.Lock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args or not self._works or not _can_replay(kwargs):
            return self._original(*args, **kwargs)
        ids, cache = kwargs["input_ids"], kwargs["past_key_values"]
        positions = kwargs.get("position_ids")
        if positions is None:
            start = cache.get_seq_length()
            positions = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        with self._lock:
            recorded = self._record(next(b for b in BUCKETS if b >= ids.shape[1]), cache)
            if recorded is not None:
                logits = recorded(ids, positions, cache)
                return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        return self._original(**kwargs)

    def _record(self, bucket: int, cache: RelayCache) -> _Recorded | None:
        """The record of a bucket, made when it is first needed; None if this model has none."""
        if bucket in self._recorded:
            return self._recorded[bucket]
        size = cache.attention.num_layers, bucket
        try:
            _Recorded(self._original, *size, _DryRun(), self._device)
            with self._recorder.session():
                recorded = _Recorded(self._original, *size, self._recorder, self._device)
        except Exception as error:  # noqa: BLE001 -- whatever a device or a model objects to
            self._works = False
            self._recorded.clear()
            logger.warning(
                "%s cannot be recorded as CUDA graphs (%s: %s); it runs without, as before",
                self._name, type(error).__name__, error,
            )  # fmt: skip
            return None
        self._recorded[bucket] = recorded
        return recorded


_EXPECTED = {"input_ids", "position_ids", "attention_mask", "past_key_values", "use_cache"}
_HARMLESS = {"return_dict", "cache_position", "logits_to_keep"}


def _can_replay(kwargs: dict[str, Any]) -> bool:
    """Whether this forward computes the last logits of one request over placed blocks."""
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    cache = kwargs.get("past_key_values")
    if not isinstance(cache, RelayCache) or ids is None:
        return False
    # Records hold no gradients.
    if ids.shape[0] > 1 or ids.shape[1] > BUCKETS[-1] or not torch.is_inference_mode_enabled():
        return False
    wanted = kwargs.get("logits_to_keep", 0)
    last_only = type(wanted) is int and (wanted == 1 or ids.shape[1] == 1)
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    is_plain = last_only and given <= _EXPECTED | _HARMLESS
    return is_plain and (mask is None or (mask.ndim == 2 and bool(mask.all())))


def record_graphs(hf_model: PreTrainedModel, recorder: Recorder | None = None) -> None:
    """Let a model on CUDA answer from recorded graphs, where relay attention is exact for it.

    Raises:
        ValueError: the model is not on one CUDA device.
    """
    if isinstance(vars(hf_model).get("forward"), GraphedForward):
        return
    if recorder is None:
        places = sorted({str(parameter.device) for parameter in hf_model.parameters()})
        if len(places) > 1 or not places[0].startswith("cuda") or "forward" in vars(hf_model):
            raise ValueError(
                f"CUDA graphs need a model on one GPU, whole; this one is on {' and '.join(places)}"
                f"{', its forward replaced' if 'forward' in vars(hf_model) else ''}"
            )
        recorder = CudaRecorder(hf_model.device)
    enable_relay(hf_model)
    forward: Any = GraphedForward(hf_model, recorder)
    hf_model.forward = forward
