"""Relay attention for one request on a GPU: tables of its blocks, and a buffer for its tail.

The tables stay at fixed memory addresses, and the buffer rarely moves, so that CUDA graphs can
replay the kernel in ``relay_kernel`` for different requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from blockattn_rag.attention.kernels import AttentionInputs
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context
from blockattn_rag.kv.rope import RotaryLayout

CHUNK_TOKENS = 512
"""Maximum number of keys in a chunk. A kernel program rotates its queries once per chunk."""

MOST_BLOCKS, MOST_CHUNKS = 2048, 4096
"""Maximum number of blocks (including the tail), and of chunks, that the tables can hold."""

TAIL_TOKENS = 2048
"""Initial capacity of the tail in tokens."""

_ALIGNMENT = 16
"""Alignment of keys and values that the kernel requires, in bytes."""


class DeviceRelay:
    """Relay attention over the blocks and the tail of the running request.

    Args:
        layouts: Rotary layout of each layer.
        outline: Head count, head size and dtype, equal for all keys and values of all layers.
        programs: Number of kernel programs that fully occupy the device.
    """

    takes_mask = False

    def __init__(
        self,
        layouts: Sequence[RotaryLayout],
        outline: tuple[int, int, torch.dtype],
        device: torch.device,
        programs: int,
    ) -> None:
        self.kv_heads, self.size, self.dtype = outline
        self.device = device
        self._programs = programs
        self.layouts = layouts
        # The kernel always rotates, so layers without rotation get one pair with frequency 0.
        none = RotaryLayout(torch.zeros(1), "half")
        self._layouts = [layout if layout.rotates else none for layout in layouts]
        layers = len(layouts)
        with torch.inference_mode(mode=False):
            self._pointers = self._zeros(layers, 2, MOST_BLOCKS, dtype=torch.int64)
            self._block_tokens = self._zeros(MOST_BLOCKS, dtype=torch.int32)
            self._angles = {
                layout: self._zeros(2, MOST_BLOCKS, layout.rotary_dim, dtype=torch.float32)
                for layout in set(self._layouts)
            }
            self._chunks = self._zeros(MOST_CHUNKS, 3, dtype=torch.int32)
            self._counts = self._zeros(2, dtype=torch.int32)
        self._make_tail(TAIL_TOKENS)
        self._addresses: WeakKeyDictionary[BlockKV, Tensor] = WeakKeyDictionary()

    def _zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype, device=self.device)

    @property
    def tail_address(self) -> int:
        """Memory address of the tail, which ``begin`` and ``load`` may change."""
        return self._tail.data_ptr()

    @property
    def room(self) -> int:
        return self._tail.shape[3]

    def reads(self, context: Context) -> bool:
        """Whether a context fits in the tables, and the kernel can read its blocks in place."""
        chunks = sum(-(-tokens // CHUNK_TOKENS) for tokens in context.lengths)
        if len(context.blocks) >= MOST_BLOCKS or chunks > MOST_CHUNKS:
            return False
        return all(self._address(kv) is not None for kv, *_ in context.blocks)

    def _address(self, kv: BlockKV) -> Tensor | None:
        """Memory addresses of a block's keys and values, ``[layers, 2]``. None if the kernel cannot
        read them."""
        known = self._addresses.get(kv)
        if known is None and all(map(self._is_plain, (*kv.keys, *kv.values))):
            pairs = zip(kv.keys, kv.values, strict=True)
            known = torch.tensor([[one.data_ptr() for one in pair] for pair in pairs])
            self._addresses[kv] = known
        return known

    def _is_plain(self, states: Tensor) -> bool:
        return (
            states.device == self.device
            and states.dtype == self.dtype
            and states.is_contiguous()
            and not states.data_ptr() % _ALIGNMENT
        )

    def load(self, context: Context) -> None:
        """Start a request with this context and an empty tail. Requires ``reads(context)``."""
        if self.room > TAIL_TOKENS:  # Free the memory of the previous request's tail.
            self._make_tail(TAIL_TOKENS)
        blocks = context.blocks
        addresses: Any = [self._address(kv) for kv, *_ in blocks]
        _upload(self._pointers, torch.stack([self._tail_addresses(), *addresses], dim=2))
        tokens = [self.room, *(kv.num_tokens for kv, *_ in blocks)]
        _upload(self._block_tokens, torch.tensor(tokens, dtype=torch.int32))
        shifts = torch.tensor([0, *(block.shift for block in blocks)])
        for layout, angles in self._angles.items():
            _upload(angles, torch.stack(layout.cos_sin(-shifts, torch.device("cpu"))), dim=1)
        chunks = [
            (index, start, min(CHUNK_TOKENS, kv.num_tokens - start))
            for index, (kv, *_) in enumerate(blocks, start=1)
            for start in range(0, kv.num_tokens, CHUNK_TOKENS)
        ]
        if chunks:
            _upload(self._chunks, torch.tensor(chunks, dtype=torch.int32), dim=0)
        self._counts[0] = len(chunks)

    def begin(self, start: int, tokens: int) -> None:
        """Prepare a forward pass over ``tokens`` new tokens after ``start`` tail tokens.

        This may move the tail, which invalidates CUDA graphs.
        """
        if start + tokens > self.room:
            self._grow(start + tokens)
        self._counts[1] = start
        torch.arange(start, start + tokens, out=self._places[:tokens])

    def _grow(self, tokens: int) -> None:
        old = self._tail
        self._make_tail(2 * tokens)
        self._tail[:, :, :, : old.shape[3]] = old
        _upload(self._pointers, self._tail_addresses()[..., None])
        self._block_tokens[0] = self.room

    def _tail_addresses(self) -> Tensor:
        """Memory addresses of the tail's keys and values, ``[layers, 2]``."""
        return torch.tensor([[states.data_ptr() for states in layer] for layer in self._tail])

    def _make_tail(self, tokens: int) -> None:
        shape = len(self.layouts), 2, self.kv_heads, tokens, self.size
        with torch.inference_mode(mode=False):
            self._tail = torch.zeros(shape, dtype=self.dtype, device=self.device)
            self._places = self._zeros(tokens, dtype=torch.int64)

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write the new tokens' keys and values ``[1, K, T, D]`` where ``begin`` has made room."""
        places = self._places[: keys.shape[2]]
        self._tail[layer, 0].index_copy_(1, places, keys[0])
        self._tail[layer, 1].index_copy_(1, places, values[0])

    def states(self, layer: int, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first tail tokens, ``[1, K, tokens, D]``, as views of the tail."""
        keys, values = self._tail[layer, :, None, :, :tokens]
        return keys, values

    def attend(self, layer: int, inputs: AttentionInputs) -> Tensor:
        """See ``RelayPlan.attend``. Reads the tail from its buffer instead of from ``inputs``."""
        assert inputs.cap is None
        assert inputs.sinks is None
        from blockattn_rag.attention.relay_kernel import attend_blocks  # Requires Triton.

        layout = self._layouts[layer]
        output = attend_blocks(
            inputs.query[0],
            self._pointers[layer],
            self._block_tokens,
            self._angles[layout],
            self._chunks,
            self._counts,
            inputs.scale,
            kv_heads=self.kv_heads,
            rotary_dim=layout.rotary_dim,
            interleaved=layout.pairing == "interleaved",
            chunk_tokens=CHUNK_TOKENS,
            programs=self._programs,
        )
        return output.transpose(0, 1)[None]


def _upload(table: Tensor, values: Tensor, dim: int = -1) -> None:
    """Copy values to the beginning of a table along ``dim``."""
    table.narrow(dim, 0, values.shape[dim]).copy_(values, non_blocking=True)
