"""Saves encoded blocks, after applying the recipe's adapter."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from vllm.distributed import get_tp_group

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.quantization import KVDtype
from blockattn_rag.kv.rope import shift_positions
from blockattn_rag.model.correction import Correction
from blockattn_rag.server.keys import BlockId, block_keys
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.shares import Share
from blockattn_rag.server.vllm.metrics import Counters
from blockattn_rag.server.vllm.pages import LayerPages, States, joined
from blockattn_rag.server.vllm.scheduler import Copy, Save, encode_name
from blockattn_rag.store.base import KVStore
from blockattn_rag.store.checks import check_finite
from blockattn_rag.store.concurrency import WriteQueue

logger = logging.getLogger("blockattn_rag")

QUEUE_BYTES = 1 << 30
"""Size limit of the queue of blocks to write; a single block may be larger."""


@dataclass(eq=False)
class BlockSaver:
    """Saves encoded blocks. All ranks of the tensor-parallel group must make the same calls.

    If a block may be stored, the first rank gathers all heads and writes a single entry, which is
    complete and independent of the number of ranks. Otherwise, each rank keeps its share in memory
    before ``save`` returns.

    Args:
        pages: Pages of all layers of the share, with measured layouts.
        home: Store for blocks that may be stored. Background threads write to it.
        kept: In-memory store for the shares of blocks that must not be stored.
        adapter: The recipe's adapter, for all blocks except those that open a prompt.
    """

    pages: Sequence[LayerPages]
    profile: ModelProfile
    share: Share
    home: KVStore
    kept: KVStore
    kv_dtype: KVDtype
    counters: Counters
    adapter: Correction | None

    def __post_init__(self) -> None:
        self._writes = WriteQueue(QUEUE_BYTES)
        self._adapter = self.adapter and self.share.cut_adapter(self.adapter)
        self._layouts = [self.profile.layers[layer].layout for layer in self.share.layers]
        self._parts: dict[str, list[Sequence[States]]] = {}
        self._unsaved: dict[str, str] = {}
        self._lock = threading.Lock()

    def copy(self, copy: Copy) -> None:
        if copy.tokens.start == 0:  # A preempted request starts again.
            self._parts[copy.request_id] = []
        self._parts[copy.request_id].append([self._read(pages, copy) for pages in self.pages])

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._parts.pop(request_id, None)

    def save(self, save: Save) -> None:
        """Save an encoding request's block from the copies made after its steps."""
        (block,) = block_keys(save.token_ids, save.plan, self.profile)
        parts = zip(*self._parts.pop(save.request_id), strict=True)
        own = self._block(block, [joined(layer) for layer in parts])
        if self._adapter is not None and not save.plan.opens_prompt:
            own = self._adapter.applied(own, self._layouts)
        if not block.keep.is_stored:
            self._keep(save.request_id, own)
            return
        states = self._gathered([own.states(layer) for layer in range(own.num_layers)])
        if states is None:
            return
        keys, values = zip(*states, strict=True)
        kv = replace(own, keys=keys, values=values).copy_to(torch.device("cpu"))
        if not self._writes.add(kv.key, kv, partial(self._store, save.request_id)):
            why = "blocks are being encoded faster than they are stored"
            self._note_failure(save.request_id, why, why)

    def unsaved(self) -> Mapping[str, str]:
        """Return the reasons for save failures since the last call, by encoding request name."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, {}
        return unsaved

    def close(self) -> None:
        self._writes.close()

    @staticmethod
    def _read(pages: LayerPages, copy: Copy) -> States:
        # Reads must start at a page boundary.
        beyond = copy.tokens.start % pages.group.page_tokens
        tokens = range(copy.tokens.start - beyond, copy.tokens.stop)
        keys, values = pages.read(pages.group.slots(copy.pages, tokens, pages.device))
        return keys[:, beyond:], values[:, beyond:]

    def _block(self, block: BlockId, states: Sequence[States]) -> BlockKV:
        return BlockKV(
            keys=tuple(
                shift_positions(keys[:, block.start :], -block.start, layout)
                for (keys, _), layout in zip(states, self._layouts, strict=True)
            ),
            values=tuple(values[:, block.start :] for _, values in states),
            token_ids=torch.tensor(block.ids, dtype=torch.int64),
            fingerprint=self.profile.fingerprint,
            digest=block.digest,
            handle="",  # The handle is the digest of the text, which is unknown here.
            namespace=block.namespaces[0],
        )

    def _keep(self, request_id: str, kv: BlockKV) -> None:
        """Keep a share in memory, for loads of this and later steps."""
        try:
            check_finite(kv, "to memory")
            self.kept.put(kv.key, kv.quantized() if self.kv_dtype == "int8" else kv)
        except (StoreError, ValueError) as error:
            self._note_failure(request_id, error)
            return
        self.counters.count("kept_blocks")

    def _store(self, request_id: str, key: str, kv: BlockKV) -> None:
        try:
            stored = kv.quantized() if self.kv_dtype == "int8" else kv
            self.home.put(key, stored)
        except (StoreError, ValueError) as error:
            cause = error.__cause__
            reason = cause.strerror if isinstance(cause, OSError) else None
            self._note_failure(request_id, error, reason or "see the server's log")
            return
        self.counters.count("saved_blocks")
        self.counters.count("saved_bytes", stored.nbytes)

    def _note_failure(self, request_id: str, why: object, reason: str = "") -> None:
        """Count and log a failure. ``reason``, which is reported to clients unless it is empty,
        must contain neither the store's location nor keys."""
        self.counters.count("save_failures")
        logger.warning("The block of request %s was not saved: %s", request_id, why)
        if reason:
            with self._lock:
                self._unsaved[encode_name(request_id)] = reason

    def _gathered(self, states: Sequence[States]) -> Sequence[States] | None:
        """Gather all heads' keys and values, by layer. Returns None on all ranks but the first."""
        group = get_tp_group()
        if group.world_size == 1:
            return states
        mine = torch.cat([state.reshape(-1) for layer in states for state in layer])
        # vLLM's gather to one rank can hang on CPUs, because the other ranks do not wait for it.
        flat = group.all_gather(mine, dim=0)
        if group.rank_in_group:
            return None
        ranks = range(group.world_size)
        shares = [Share.of(self.profile, rank, len(ranks)) for rank in ranks]
        shapes = [state.shape for layer in states for state in layer]
        parts = flat.view(len(ranks), -1).split([shape.numel() for shape in shapes], dim=1)
        whole = []
        for place, (part, shape) in enumerate(zip(parts, shapes, strict=True)):
            # If there are more ranks than heads, several ranks have the same head.
            by_heads = {shares[rank].heads[place // 2].start: part[rank] for rank in ranks}
            whole.append(torch.cat([heads.view(shape) for heads in by_heads.values()]))
        return list(zip(whole[::2], whole[1::2], strict=True))
