"""Blocks on their way to the model's device: a model starts on its first layer while others travel.

A question needs the blocks' keys and values layer by layer, and so a thread of its own moves them:
to CUDA by way of page-locked memory and a stream beside the model's, which waits for each layer
only when it comes to it. *Not measured on a GPU yet.*
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from blockattn_rag.engine.threads import start_thread
from blockattn_rag.kv.block_kv import BlockKV


def bring(blocks: Sequence[BlockKV], device: torch.device) -> list[BlockKV]:
    """Blocks on ``device``; on CUDA those from elsewhere may still be on their way."""
    if device.type == "cuda" and any(kv.device.type == "cpu" for kv in blocks):
        return send(blocks, device)
    return [kv.to(device) for kv in blocks]


def send(blocks: Sequence[BlockKV], device: torch.device) -> list[BlockKV]:
    """Copies of blocks of one model on ``device``, which a thread fills layer by layer."""
    if not blocks:
        return []
    transfer = _Transfer(blocks, device)
    copies = list(transfer.copies)
    transfer.start()
    return copies


class _Transfer:
    """What the thread does, and how others wait for it (``kv.Arrival``)."""

    def __init__(self, blocks: Sequence[BlockKV], device: torch.device) -> None:
        self._sources = tuple(blocks)
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._arrived = [threading.Event() for _ in range(blocks[0].num_layers)]
        self._events: list[Any] = []  # of CUDA, one for each layer that was sent
        self._error: BaseException | None = None
        self.copies = tuple(self._empty_copy(kv) for kv in blocks)
        self._stream = self._stream_beside() if self._is_cuda else None

    def start(self) -> None:
        start_thread(self._run, "blockattn-transfer", lambda: None)

    def wait(self, layer: int) -> None:
        """Return when a layer is there; on CUDA, let the current stream wait for it instead.

        Raises:
            RuntimeError: the transfer failed.
        """
        self._arrived[layer].wait()
        if self._error is not None:
            raise RuntimeError(
                f"moving blocks to {self._device} failed: {self._error}"
            ) from self._error
        if self._is_cuda and not self._events[layer].query():
            torch.cuda.current_stream(self._device).wait_event(self._events[layer])

    @property
    def failed(self) -> bool:
        """Whether some layers will never be there."""
        return self._error is not None

    def _empty_copy(self, kv: BlockKV) -> BlockKV:
        """One tensor for all layers, so that a block can be freed by itself; layers of different
        number types are a tensor each."""
        states = [t for layer in zip(kv.keys, kv.values, strict=True) for t in layer]
        if len({t.dtype for t in states}) == 1:
            count = sum(t.numel() for t in states)
            flat = torch.empty(count, dtype=states[0].dtype, device=self._device)
            parts = torch.split(flat, [t.numel() for t in states])
            copies = [part.view(t.shape) for part, t in zip(parts, states, strict=True)]
        else:
            copies = [torch.empty_like(t, device=self._device) for t in states]
        return replace(
            kv,
            keys=tuple(copies[::2]),
            values=tuple(copies[1::2]),
            token_ids=kv.token_ids.clone(),
            arrival=self,
        )

    def _stream_beside(self) -> Any:
        """A stream that starts when the copies' memory is free, and holds it until it ends."""
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        for kv in self.copies:
            kv.keys[0].record_stream(stream)  # all states of a block share its memory
        return stream

    def _run(self) -> None:
        beside: AbstractContextManager[Any] = (
            torch.cuda.stream(self._stream) if self._is_cuda else nullcontext()
        )
        try:
            with torch.inference_mode(), beside:
                for layer, arrived in enumerate(self._arrived):
                    self._move(layer)
                    arrived.set()
        except BaseException as error:  # noqa: BLE001 -- raised again by those who wait
            self._error = error
        finally:
            # The copies hold this; without them it holds no memory.
            self._sources = self.copies = ()
            for arrived in self._arrived:
                arrived.set()

    def _move(self, layer: int) -> None:
        for source, copy in zip(self._sources, self.copies, strict=True):
            keys, values = source.states(layer)
            copy.keys[layer].copy_(self._pinned(keys), non_blocking=True)
            copy.values[layer].copy_(self._pinned(values), non_blocking=True)
        if self._is_cuda:
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
            self._events.append(event)

    def _pinned(self, states: Tensor) -> Tensor:
        """In page-locked memory, from where CUDA copies without waiting."""
        return states.pin_memory() if self._is_cuda and states.device.type == "cpu" else states
