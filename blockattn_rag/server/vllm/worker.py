"""Worker half of the connector, which loads blocks into pages and saves blocks from pages."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.model_executor.models.utils import extract_layer_index

from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import LoadError, ServingError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import PlacedBlock, joined_states
from blockattn_rag.kv.rope import Angles
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.keys import BlockId, block_keys
from blockattn_rag.server.loader import BlockLoader
from blockattn_rag.server.profile import LayerProfile, ModelProfile
from blockattn_rag.server.shares import Share, open_share
from blockattn_rag.server.vllm.compatibility import check_rotations
from blockattn_rag.server.vllm.metrics import Counters, Ended, Fetch, ServingStats, WorkerReport
from blockattn_rag.server.vllm.pages import KVGroup, LayerPages, sizes_of
from blockattn_rag.server.vllm.recomputing import Recomputer
from blockattn_rag.server.vllm.saver import BlockSaver
from blockattn_rag.server.vllm.scheduler import Load, Orders
from blockattn_rag.store import MemoryStore, TieredStore, open_store

logger = logging.getLogger("blockattn_rag")

_NAP_S = 0.002

_PAUSE_S = 0.5
"""Seconds to skip a tier after repeated failures. Short, because requests whose blocks are only in
that tier fail in the meantime."""


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Finished load of this rank, waiting for other ranks before tokens are recomputed."""

    order: Load
    int8_blocks: int
    since: float


@dataclass(frozen=True, slots=True)
class _Loading:
    """Running load, with the blocks that have tokens to write to pages."""

    order: Load
    wanted: Sequence[BlockId]
    blocks: Future[list[BlockKV]]
    since: float


class WorkerSide:
    """Executes the scheduler's orders on one rank: loads, recomputation and saves.

    Only the worker's main thread accesses pages, before and after a forward pass. Other threads
    read and write stores.

    Args:
        layers: Attention layers of this rank with their KV cache groups, by name.
    """

    def __init__(
        self,
        config: ServingConfig,
        profile: ModelProfile,
        recipe: Recipe,
        engine: VllmConfig,
        layers: Mapping[str, tuple[Any, KVGroup]],
    ) -> None:
        self._config = config
        self._profile = profile
        self._loading: dict[str, _Loading] = {}
        self._done = KVConnectorTransferResults()
        self._report = WorkerReport()
        self._waiting: dict[str, _Loaded | None] = {}  # None: the load failed.
        self._stats = Counters()
        by_index = {
            extract_layer_index(name): (layer, group)
            for name, (layer, group) in layers.items()
            if getattr(layer, "kv_sharing_target_layer_name", None) is None
        }
        # Draft layers of speculative decoding come after the model's layers.
        indices = sorted(index for index in by_index if index < profile.hidden_layers)
        pipe, group = get_pp_group(), get_tp_group()
        own = _own_layers(indices, pipe.world_size, profile)
        share = Share.of(profile, group.rank_in_group, group.world_size, own)
        self._share = share
        own_layers = [by_index[index] for index in indices]
        for place, heads, (layer, _) in zip(own, share.heads, own_layers, strict=True):
            _check_layer(layer, len(heads), profile.layers[place], profile.name)
        interleaved = check_rotations(profile, own)
        self._pages = [
            LayerPages(layer, page_group, interleaves_keys=place in interleaved)
            for place, (layer, page_group) in zip(own, own_layers, strict=True)
        ]
        if config.encodes or profile.recipe.recompute:
            layouts: dict[tuple[Any, ...], torch.Tensor] = {}
            for pages in self._pages:
                pages.measure(layouts)
        self._recomputer = None
        if profile.recipe.recompute:
            self._recomputer = Recomputer(self._pages, engine)
        home = open_store(config.store)
        tiers = config.nearer_tiers(profile, share)
        rest = open_share(home, share, profile)
        self._store = TieredStore(*tiers.values(), rest, pause_s=_PAUSE_S)
        self._tier_names = (*tiers, "home")
        self._tiers = self._store.tier_stats()
        outline = share.token_outline(profile)
        # All ranks keep the same number of tokens, so that they evict the same blocks.
        token_bytes = sum(heads * size * dtype.itemsize for heads, size, dtype in outline)
        kept = MemoryStore(max(config.private_tokens(profile) * token_bytes, 1), on_host=True)
        self._loader = BlockLoader(
            self._store, outline, kept, self._stats.count, config.load_deadline_s
        )
        self._saver = BlockSaver(
            self._pages, profile, share, home, kept, config.kv_dtype, self._stats, recipe.adapter
        )

    def execute(self, orders: Orders) -> None:
        """Execute a step's orders: save blocks, recompute tokens, and start loads."""
        for request_id in orders.refused:
            self._fail(request_id)
        for save in orders.saves:
            # Saves come first, because loads may need a block that is kept in memory.
            self._saver.save(save)
        for request_id, is_used in orders.ended.items():
            self._recompute(request_id, is_used=is_used)
        for load in orders.loads:
            self._start(load)
        if orders.is_idle and self._loading:
            futures = [loading.blocks for loading in self._loading.values()]
            wait(futures, _NAP_S, FIRST_COMPLETED)

    def copy(self, orders: Orders) -> None:
        """After the model has run, copy the keys and values computed for encoding requests."""
        for copy in orders.copies:
            self._saver.copy(copy)

    def done(self, ended: Iterable[str]) -> KVConnectorTransferResults:
        """Finish a step by writing loaded blocks to pages. Returns the requests whose loads have
        completed or failed since the last call. ``ended``: Ids of requests that have ended."""
        self._saver.forget(ended)
        for request_id in [key for key, loading in self._loading.items() if loading.blocks.done()]:
            self._finish(self._loading.pop(request_id))
        done, self._done = self._done, KVConnectorTransferResults()
        return done

    def report(self) -> WorkerReport | None:
        report, self._report = self._report, WorkerReport()
        report.unsaved = self._saver.unsaved()
        return report if report != WorkerReport() else None

    def counted(self) -> ServingStats | None:
        before, self._tiers = self._tiers, self._store.tier_stats()
        self._stats.count_tiers(before, self._tiers, self._tier_names)
        return self._stats.taken()

    def close(self) -> None:
        self._saver.close()
        self._loader.close()
        self._store.close()

    def _start(self, load: Load) -> None:
        blocks = block_keys(load.token_ids, load.plan, self._profile, self._config.read_namespaces)
        missing = [block for block in blocks if block.start + len(block.ids) > load.computed]
        began = time.monotonic()
        self._loading[load.request_id] = _Loading(load, missing, self._loader.start(missing), began)

    def _finish(self, loading: _Loading) -> None:
        """Write the blocks of a completed load to pages, or fail the request."""
        request_id, order = loading.order.request_id, loading.order
        recomputes = self._profile.recomputed_tokens(order.plan) > 0
        try:
            blocks = loading.blocks.result()
        except LoadError as error:
            logger.warning("Request %s failed: %s", request_id, error)
            if recomputes:
                self._end(request_id, None)
            else:
                self._fail(request_id)
            return
        seconds = time.monotonic() - loading.since
        self._write(order, loading.wanted, blocks)
        quantized = sum(kv.scales is not None for kv in blocks)
        if recomputes:
            self._end(request_id, _Loaded(order, quantized, loading.since))
            return
        self._report.fetches[request_id] = Fetch(seconds, quantized)
        self._done.finished_recving.add(request_id)

    def _end(self, request_id: str, loaded: _Loaded | None) -> None:
        """Report the end of a load. The scheduler orders recomputation once all ranks report it."""
        self._waiting[request_id] = loaded
        self._report.ended[request_id] = Ended(1, int(loaded is None))

    def _recompute(self, request_id: str, *, is_used: bool) -> None:
        """Complete a load that has ended on all ranks. Recompute tokens if it ``is_used``."""
        loaded = self._waiting.pop(request_id)
        if loaded is None:
            self._fail(request_id)
            return
        self._done.finished_recving.add(request_id)
        if not is_used or self._recomputer is None:
            return
        plan, pages = loaded.order.plan, self._pages[0]
        # There is only one group, because no layer has a window.
        slots = pages.group.slots(loaded.order.pages, range(plan.context_tokens), pages.device)
        count = self._profile.recomputed_tokens(plan)
        chosen = self._recomputer.recompute(loaded.order.token_ids, slots, plan, count)
        ends = [bisect_left(chosen, end) for end in accumulate(plan.lengths)]
        recomputed = tuple(end - start for start, end in pairwise([0, *ends]))
        seconds = time.monotonic() - loaded.since
        self._report.fetches[request_id] = Fetch(seconds, loaded.int8_blocks, recomputed)

    def _write(self, order: Load, wanted: Sequence[BlockId], blocks: Sequence[BlockKV]) -> None:
        device = self._pages[0].device
        placed = [
            PlacedBlock(_on(device, kv), one.start, one.start)
            for one, kv in zip(wanted, blocks, strict=True)
        ]
        for group in {pages.group for pages in self._pages}:
            start = max(order.computed, group.first_token(order.pages))
            tokens = range(start, order.plan.context_tokens)
            if not tokens:
                continue
            slots = group.slots(order.pages, tokens, device)
            read = [block for block in placed if block.start + block.kv.num_tokens > start]
            skipped = start - read[0].start  # Tokens of the first block that are not written.
            angles: Angles = {}
            for index, pages in enumerate(self._pages):
                if pages.group == group:
                    layout = self._profile.layers[self._share.layers[index]].layout
                    keys, values = joined_states(read, index, layout, angles)
                    pages.write(keys[:, skipped:], values[:, skipped:], slots)

    def _fail(self, request_id: str) -> None:
        self._done.finished_recving.add(request_id)
        self._done.failed_recving.add(request_id)


def _on(device: torch.device, kv: BlockKV) -> BlockKV:
    """Copy a block to a device, without waiting for the worker's other GPU work."""
    if kv.device == device:
        return kv
    layers = [kv.tensors(layer) for layer in range(kv.num_layers)]
    return kv.with_tensors([[t.to(device, non_blocking=True) for t in layer] for layer in layers])


def _own_layers(indices: Sequence[int], ranks: int, profile: ModelProfile) -> range:
    """Return the range of ``profile.layers`` that this pipeline-parallel rank has. ``indices``:
    Model indices of its layers with pages. Raises ServingError if the profile lacks them."""
    expected = [layer.index for layer in profile.layers]
    own = range(len(expected))
    if ranks > 1 and indices and indices[0] in expected:
        start = expected.index(indices[0])
        own = own[start : start + len(indices)]
    if not indices or expected[own.start : own.stop] != list(indices):
        raise ServingError(
            f"vLLM stores keys and values of layers {list(indices)}, but {profile.name} has them "
            f"in layers {expected}; report this model"
        )
    return own


def _check_layer(layer: Any, heads: int, described: LayerProfile, model: str) -> None:
    if described.is_latent and getattr(layer, "kv_lora_rank", None) is None:
        raise ServingError(
            f"Layer {described.index} of {model} has latent attention (MLA), but vLLM stores keys "
            "and values of all heads. Unset VLLM_MLA_DISABLE; if it is not set, vLLM does not "
            "support latent attention for this model: use the model in process"
        )
    found, expected = sizes_of(layer), (heads, described.key_size, described.value_size)
    if found != expected:
        raise ServingError(
            f"Layer {described.index} has (heads, key size, value size) {found}, expected "
            f"{expected}, as in the config of {model}; report this model"
        )
    if not hasattr(layer.impl, "do_kv_cache_update"):
        raise ServingError(
            f"Blocks cannot be loaded, because {type(layer.impl).__name__} writes pages only "
            "during attention; use another attention backend (--attention-backend)"
        )
