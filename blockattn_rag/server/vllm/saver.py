"""Keeping blocks that were encoded here: out of the pages, over the ranks, to the home; or, if they
may not be stored, in the memory of each rank."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from vllm.distributed import get_tp_group

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.kv.rope import shift_positions
from blockattn_rag.prompts.blocks import may_store
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import BlockId, block_keys
from blockattn_rag.server.shares import Share
from blockattn_rag.server.vllm.metrics import Counters
from blockattn_rag.server.vllm.orders import Save, encode_name
from blockattn_rag.server.vllm.pages import LayerPages
from blockattn_rag.store.base import KVStore
from blockattn_rag.store.checks import check_finite
from blockattn_rag.store.write_queue import WriteQueue

logger = logging.getLogger("blockattn_rag")

QUEUE_BYTES = 1 << 30
"""Blocks that wait to be written, at most; a single one may be larger."""

States = list[tuple[Tensor, Tensor]]
"""Keys and values of layers."""


class BlockSaver:
    """Keeps blocks; the same calls must be made on every rank of the tensor-parallel group.

    Of a block that may be stored, the first rank gathers all heads and writes one entry, so that an
    entry is there whole or not at all, and is the same whichever engine wrote it. Of any other
    block, each rank keeps its share, before ``save`` returns.

    Args:
        pages: of all layers of the share.
        share: what this rank holds.
        home: where entries are written, in threads of its own; whoever has it read-only, or has
            not all layers, saves no block that may be stored.
        kept: where the share is kept of blocks that may not be stored: in memory alone.

    Raises:
        ServingError: what a layer writes to its pages cannot be read there.
    """

    def __init__(
        self,
        pages: Sequence[LayerPages],
        profile: ModelProfile,
        share: Share,
        home: KVStore,
        kept: KVStore,
        kv_dtype: KVDtype,
        counters: Counters,
    ) -> None:
        self._pages = pages
        self._profile = profile
        self._share = share
        self._home = home
        self._kept = kept
        self._quantises = kv_dtype == "int8"
        self._writes = WriteQueue(QUEUE_BYTES)
        self._counters = counters
        self._unsaved: dict[str, str] = {}
        self._lock = threading.Lock()
        for place, one in enumerate(pages):
            one.share_layout(pages[:place])

    def save(self, save: Save, slots: Tensor) -> None:
        """Copy a block out of its pages, whose slots ``[tokens]`` are those of the whole prompt.

        Raises:
            ProtocolError: the plan does not fit the tokens.
        """
        (block,) = block_keys(save.token_ids, save.plan, self._profile)
        own = [one.read(slots) for one in self._pages]
        if not may_store(block.keep):
            self._keep(save.request_id, self._block(block, own))
            return
        states = self._gathered(own)
        if states is None:
            return
        kv = self._block(block, states).copy_to(torch.device("cpu"))
        if not self._writes.add(kv.key, kv, partial(self._store, save.request_id)):
            why = "blocks are encoded faster than they are stored"
            self._count_failure(save.request_id, why)
            self._note_unsaved(save.request_id, why)

    def unsaved(self) -> Mapping[str, str]:
        """Why blocks could not be stored since this was last asked, by the name of the encoding
        request. Clients read the reasons: they name neither the store's place nor a key."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, {}
        return unsaved

    def close(self) -> None:
        """Write what waits, and take no more."""
        self._writes.close()

    def _block(self, block: BlockId, states: States) -> BlockKV:
        """A block of these layers' keys and values, which may have stood after a sink."""
        layouts = [self._profile.layouts[layer] for layer in self._share.layers]
        keys = [
            shift_positions(one[:, block.start :], -block.start, layout)
            for (one, _), layout in zip(states, layouts, strict=True)
        ]
        return BlockKV(
            keys=tuple(keys),
            values=tuple(values[:, block.start :] for _, values in states),
            token_ids=torch.tensor(block.ids, dtype=torch.int64),
            fingerprint=self._profile.fingerprint,
            digest=block.digest,
            handle="",  # of a text, which is not known here
            namespace=block.namespaces[0],
        )

    def _keep(self, request_id: str, kv: BlockKV) -> None:
        """Keep a share in memory. Loads of the same step, and of all later ones, find it."""
        try:
            check_finite(kv, "to memory")
            kept = kv.quantised() if self._quantises else kv
            self._kept.put(kv.key, kept)
        except (StoreError, ValueError) as error:
            self._count_failure(request_id, str(error))
            return
        self._counters.count("kept_blocks")

    def _store(self, request_id: str, key: str, kv: BlockKV) -> None:
        try:
            stored = kv.quantised() if self._quantises else kv
            self._home.put(key, stored)
        except (StoreError, ValueError) as error:
            self._count_failure(request_id, str(error))
            cause = error.__cause__
            reason = cause.strerror if isinstance(cause, OSError) else None
            self._note_unsaved(request_id, reason or "the server's log says why")
            return
        self._counters.count("saved_blocks")
        self._counters.count("saved_bytes", stored.nbytes)

    def _count_failure(self, request_id: str, why: str) -> None:
        self._counters.count("save_failures")
        logger.warning("the block of request %s is not kept: %s", request_id, why)

    def _note_unsaved(self, request_id: str, why: str) -> None:
        with self._lock:
            self._unsaved[encode_name(request_id)] = why

    def _gathered(self, states: States) -> States | None:
        """Each layer's keys and values with the heads of all ranks; None but on the first rank."""
        group = get_tp_group()
        if group.world_size == 1:
            return states
        mine = torch.cat([one.reshape(-1) for layer in states for one in layer])
        flat = group.gather(mine, dst=0, dim=0)
        if flat is None:
            return None
        shapes = [one.shape for layer in states for one in layer]
        sizes = [shape.numel() for shape in shapes]
        parts = [rank.split(sizes) for rank in flat.split(len(mine))]
        shares = [Share.of(self._profile, rank, group.world_size) for rank in range(len(parts))]
        whole = []
        for place, shape in enumerate(shapes):
            # Where there are more ranks than heads, several ranks have the same ones.
            by_heads = {
                share.heads[place // 2].start: part[place].view(shape)
                for share, part in zip(shares, parts, strict=True)
            }
            whole.append(torch.cat([by_heads[start] for start in sorted(by_heads)]))
        return list(zip(whole[::2], whole[1::2], strict=True))
