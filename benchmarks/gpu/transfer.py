"""Measure block loads from host memory and disk: bandwidth, and overlap with computation.

The same prompt is answered on the relay path with its blocks on the device, in page-locked host
memory, in files in the system's page cache, and in files that must be read from disk. Each run
recomputes the question. ``fetch`` is the engine's time to look up, read and transfer the blocks.

``overlap`` is the share of the fetch that does not delay the first token: 1 - (first token - first
token with blocks on the device) / fetch. ``ceiling`` is the bandwidth of copying one large tensor
to the device, from page-locked and from pageable memory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from harness import Campaign, Case, Record, median_s
from measuring import PATHS, in_turns
from random_models import random_prompt

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.store import DirectoryStore, KVStore, MemoryStore

SHAPES, LENGTHS = ("8b", "1b"), (8_192, 32_768)
BLOCK_TOKENS, QUESTION_TOKENS = 512, 50


def cases(campaign: Campaign) -> Iterator[Case]:
    shapes, lengths = (("tiny",), (64,)) if campaign.dry else (SHAPES, LENGTHS)
    yield Case("ceiling", partial(ceiling, campaign))
    for shape in shapes:
        for length in lengths:
            yield Case(f"{shape}/{length}", partial(tiers, campaign, shape, length))


def ceiling(campaign: Campaign) -> Record:
    """Measure ``pinned_bytes_per_s`` and ``pageable_bytes_per_s`` of a host-to-device copy."""
    size = 1 << (20 if campaign.dry else 31)
    target = torch.empty(size, dtype=torch.uint8, device=campaign.device)
    source = torch.randint(255, (size,), dtype=torch.uint8)
    row = {"pageable_bytes_per_s": size / median_s(lambda: target.copy_(source), campaign.device)}
    if campaign.device.type == "cuda":
        pinned = source.pin_memory()
        copy_s = median_s(lambda: target.copy_(pinned, non_blocking=True), campaign.device)
        row["pinned_bytes_per_s"] = size / copy_s
    return row


def tiers(campaign: Campaign, shape: str, length: int) -> Record:
    """Measure ``<tier>_s`` for all tiers, and, except for the device, ``<tier>_fetch_s``,
    ``<tier>_bytes_per_s`` and ``<tier>_overlap``."""
    model = campaign.model(shape, max(LENGTHS) + 1024)
    block = min(BLOCK_TOKENS, length // 2)
    prompt = random_prompt(length, block, QUESTION_TOKENS, model.config.vocab_size)
    device, host = MemoryStore(1 << 40), MemoryStore(1 << 40, on_host=True)
    campaign.engine(model, store=device).encode(prompt)
    with tempfile.TemporaryDirectory() as folder:
        disk = DirectoryStore(folder, fsync=False)
        for kv in map(device.get, device.keys()):
            assert kv is not None, "a block is missing from a store without eviction"
            host.put(kv.key, kv)
            disk.put(kv.key, kv)
        stores: dict[str, KVStore] = {
            "device": device,
            "host": host,
            "page cache": disk,
            "disk": disk,
        }
        fetch_s: dict[str, list[float]] = {tier: [] for tier in stores}
        ways = {}
        for tier, store in stores.items():
            engine = campaign.engine(model, store=store, assembly="relay", on_miss="error")
            root = Path(folder) if tier == "disk" else None
            ways[tier] = partial(first_token_s, engine, prompt, root, fetch_s[tier])
        row: Record = in_turns(ways, campaign.repeats)
    nbytes = length * model.bytes_per_token
    row |= {"length": length, "block_tokens": block, "bytes": nbytes}
    for tier, (_, *counted) in fetch_s.items():  # The first run of each tier is a warm-up.
        row[f"{tier}_fetch_s"] = waited = statistics.median(counted)
        if tier != "device":
            row[f"{tier}_bytes_per_s"] = nbytes / waited
            row[f"{tier}_overlap"] = 1 - (row[f"{tier}_s"] - row["device_s"]) / waited
    return row


def first_token_s(
    engine: BlockAttentionEngine, prompt: BlockPrompt, uncached: Path | None, fetch_s: list[float]
) -> float:
    """Return the seconds to the first token, and append the seconds of the fetch. Files in
    ``uncached`` are dropped from the system's page cache first."""
    if uncached is not None:
        drop_cached(uncached)
    stats = engine.generate(prompt, max_new_tokens=1, **PATHS["relay"]).stats
    fetch_s.append(stats.fetch_s)
    return stats.ttft_s


def drop_cached(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # Only pages that have been written to disk can be dropped.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
