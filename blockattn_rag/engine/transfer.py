"""Copies of blocks to the model's device, made while the model already runs.

A model reads keys and values layer by layer, so a thread copies them layer by layer, and the model
waits for a layer only when it comes to that layer. On CUDA the copies go through page-locked memory
on a stream beside the model's (``attention.cuda.CopyStream``; not measured on a GPU yet).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from blockattn_rag.attention.cuda import CopyStream, pinned
from blockattn_rag.engine.threads import start_thread
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.store.layout import ALIGNMENT


def to_device(blocks: Sequence[BlockKV], device: torch.device) -> list[BlockKV]:
    """Blocks on ``device``; on CUDA, copies of blocks from elsewhere may still be pending."""
    if device.type == "cuda" and any(kv.device.type == "cpu" for kv in blocks):
        return copy_async(blocks, device)
    return [kv.to(device) for kv in blocks]


def copy_async(blocks: Sequence[BlockKV], device: torch.device) -> list[BlockKV]:
    """Copies on ``device`` of one model's blocks, at least one; a thread fills them by layers."""
    copy = _LayerwiseCopy(blocks, device)
    targets = list(copy.targets)  # the thread drops its references when it ends
    start_thread(copy.run, "blockattn-transfer", lambda: None)
    return targets


class _LayerwiseCopy:
    """The work of the copying thread, and how readers wait for a layer (a ``PendingCopy``)."""

    def __init__(self, blocks: Sequence[BlockKV], device: torch.device) -> None:
        self._sources = tuple(blocks)
        self._device = device
        self._done = [threading.Event() for _ in range(blocks[0].num_layers)]
        self._error: BaseException | None = None
        self.targets = tuple(self._empty_copy(kv) for kv in blocks)
        # All states of a block share the memory of its first ones.
        memory = [kv.keys[0] for kv in self.targets]
        self._stream = CopyStream(device, memory) if device.type == "cuda" else None

    def wait(self, layer: int) -> None:
        """Return when a layer is copied; on CUDA, let the current stream wait for it instead.

        Raises:
            RuntimeError: the copy failed.
        """
        self._done[layer].wait()
        if self._error is not None:
            message = f"moving blocks to {self._device} failed: {self._error}"
            raise RuntimeError(message) from self._error
        if self._stream is not None:
            self._stream.wait(layer)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def run(self) -> None:
        """Copy all layers. An error is raised in the threads that wait."""
        try:
            with torch.inference_mode(), self._stream.entered() if self._stream else nullcontext():
                for layer, done in enumerate(self._done):
                    self._copy_layer(layer)
                    done.set()
        except BaseException as error:  # noqa: BLE001 -- raised again by those who wait
            self._error = error
        finally:
            # Targets refer to this object; references to them would keep their memory in use.
            self._sources = self.targets = ()
            for done in self._done:
                done.set()

    def _copy_layer(self, layer: int) -> None:
        for source, target in zip(self._sources, self.targets, strict=True):
            source.stored(layer)  # waits for it
            for states, empty in zip(source.tensors(layer), target.tensors(layer), strict=True):
                empty.copy_(states if self._stream is None else pinned(states), non_blocking=True)
        if self._stream is not None:
            self._stream.mark()

    def _empty_copy(self, kv: BlockKV) -> BlockKV:
        """One piece of memory for all layers, so that a block can be freed by itself."""
        layers = [kv.tensors(layer) for layer in range(kv.num_layers)]
        # Each begins at a multiple of the alignment, whatever the number type before it.
        sizes = [-(-t.nbytes // ALIGNMENT) * ALIGNMENT for layer in layers for t in layer]
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        parts = iter(torch.split(flat, sizes))
        copies = [
            [next(parts)[: t.nbytes].view(t.dtype).view(t.shape) for t in layer] for layer in layers
        ]
        return kv.with_tensors(copies, pending_copy=self)
