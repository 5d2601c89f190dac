"""Replay of a trace, which estimates what prefix caching and block reuse save."""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from blockattn_rag.lab.efficiency.shapes import prefill_flops
from blockattn_rag.lab.planning import Clock, Footprint
from blockattn_rag.lab.trace import Request, Segment, distinct_blocks
from blockattn_rag.lazy import missing_extra

PAGE_TOKENS = 16
"""Tokens of a page of a prefix cache: vLLM's default."""
_BEAM = 8
"""Width of the beam search for the longest cached prefix."""

Policy = Literal["full", "prefix", "prefix-sorted", "blocks", "blocks-ingested"]
LABELS: dict[Policy, str] = {
    "full": "full prefill",
    "prefix": "prefix cache",
    "prefix-sorted": "prefix cache, best order",
    "blocks": "blocks",
    "blocks-ingested": "blocks, ingested before",
}


@dataclass(frozen=True, slots=True)
class Served:
    """A request that was looked up in a cache.

    Args:
        request: The request.
        reused: Number of reused tokens in each segment.
        read_bytes: Bytes of the blocks that were read.
    """

    request: Request
    reused: Sequence[int]
    read_bytes: int = 0


@dataclass(slots=True)
class _Run:
    number: int
    pages: int = 0


class PrefixCache:
    """Prefix cache as in vLLM: pages of 16 tokens, with eviction of the least recently used page.

    A page is reused if an earlier request had the same tokens up to the end of the page. The last
    token of a request is always computed. The pages of a request are evicted from last to first.
    Only full pages of prompts take room. vLLM also needs room for answers and partial pages, so the
    simulation slightly favours the prefix cache.

    Pages are counted in runs. A run consists of the pages that end in the same segment after the
    same prefix. They are always used together, so counting runs is exact, and takes time and memory
    per segment instead of per page.

    Args:
        room_pages: Number of pages that fit. Default: no limit.
    """

    def __init__(self, room_pages: int | None = None) -> None:
        self._room_pages = room_pages
        self._used_pages = 0
        # Keys: number of the preceding run, id of the segment. Least recently used run first.
        self._runs: OrderedDict[tuple[int, str], _Run] = OrderedDict()
        self._numbers = itertools.count(1)

    def serve(self, request: Request) -> Served:
        """Look up a request's pages, then cache all of them."""
        keys: list[tuple[int, str]] = []
        before, end, hits, is_hit = 0, 0, 0, True
        for segment in request:
            start, end = end, end + segment.tokens
            pages = end // PAGE_TOKENS - start // PAGE_TOKENS
            keys.append((before, segment.id))
            run = self._runs.get(keys[-1])
            if run is None:
                run = self._runs[keys[-1]] = _Run(next(self._numbers))
            if is_hit:
                hits += run.pages
                is_hit = run.pages == pages
            self._used_pages += pages - run.pages
            run.pages = pages
            before = run.number
        for key in reversed(keys):
            self._runs.move_to_end(key)
        self._evict()
        left = PAGE_TOKENS * min(hits, (end - 1) // PAGE_TOKENS)
        reused = []
        for segment in request:
            reused.append(min(left, segment.tokens))
            left -= reused[-1]
        return Served(request, reused)

    def reordered(self, request: Request, gains: Mapping[str, int]) -> Request:
        """Reorder the blocks of a request to reuse as many pages as possible.

        A beam search finds the blocks that form the longest cached prefix. They come first. The
        other blocks follow, sorted by gain, largest first.

        Args:
            request: The request. Its last segment stays last.
            gains: Benefit of placing a block early in a prompt, by block id.
        """
        blocks = sorted(request[:-1], key=lambda block: -gains[block.id])
        best: tuple[int, ...] = ()
        beam: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]  # pages, run, blocks
        while beam:
            best = beam[0][2]
            longer = [
                (pages + run.pages, run.number, (*chosen, i))
                for pages, number, chosen in beam
                for i, block in enumerate(blocks)
                if i not in chosen and (run := self._runs.get((number, block.id)))
            ]
            beam = sorted(longer, key=lambda path: -path[0])[:_BEAM]
        rest = (block for i, block in enumerate(blocks) if i not in best)
        return (*(blocks[i] for i in best), *rest, request[-1])

    def _evict(self) -> None:
        while self._room_pages is not None and self._used_pages > self._room_pages:
            key, run = next(iter(self._runs.items()))
            evicted = min(run.pages, self._used_pages - self._room_pages)
            run.pages -= evicted
            self._used_pages -= evicted
            if not run.pages:
                del self._runs[key]


class BlockCache:
    """Store of blocks, with eviction of the least recently used block.

    Args:
        footprint: Sizes of the model's blocks.
        room_bytes: Capacity in bytes. A larger block is not stored. Default: no limit.
    """

    def __init__(self, footprint: Footprint, room_bytes: int | None = None) -> None:
        self._footprint = footprint
        self._room_bytes = room_bytes
        self._blocks: OrderedDict[str, int] = OrderedDict()
        self.used_bytes = 0

    def put(self, segment: Segment) -> None:
        """Store a block."""
        if segment.id in self._blocks:
            return
        size = self._footprint.block_bytes(segment.tokens)
        if self._room_bytes is not None:
            if size > self._room_bytes:
                return
            while self.used_bytes + size > self._room_bytes:
                self.used_bytes -= self._blocks.popitem(last=False)[1]
        self._blocks[segment.id] = size
        self.used_bytes += size

    def serve(self, request: Request) -> Served:
        """Look up all blocks, then store the missing ones. A repeated block is computed once."""
        reused, missing = [], {}
        read: dict[str, int] = {}
        for block in request[:-1]:
            is_repeated = block.id in missing
            if block.id in self._blocks:
                self._blocks.move_to_end(block.id)
                read[block.id] = self._blocks[block.id]
            elif not is_repeated:
                missing[block.id] = block
            reused.append(block.tokens if is_repeated or block.id in read else 0)
        for block in missing.values():
            self.put(block)
        return Served(request, [*reused, 0], sum(read.values()))


@dataclass(frozen=True, slots=True)
class ReplayClock(Clock):
    """Estimates the time to first token of a served request."""

    @property
    def page_bytes(self) -> int:
        """Size of a page of the prefix cache in bytes. Pages are not quantised."""
        model = self.footprint
        return PAGE_TOKENS * (model.dequantised_bytes_per_token or model.bytes_per_token)

    @property
    def block_room_bytes(self) -> int:
        """Main memory that is available for blocks, in bytes."""
        weights = self.footprint.weight_bytes if self.machine.gpu_bytes is None else 0
        return self.machine.memory_bytes - weights

    def prefix_s(self, served: Served) -> float:
        """Seconds with a prefix cache on the device."""
        cached = sum(served.reused)
        new = sum(segment.tokens for segment in served.request) - cached
        return self.prefill_s(new, cached, cached * self.page_bytes // PAGE_TOKENS)

    def blocks_s(self, served: Served, *, from_disk: bool) -> float:
        """Seconds if blocks are read from memory or disk, or encoded."""
        *blocks, final = served.request
        hits = [tokens > 0 for tokens in served.reused[:-1]]
        computed = [block.tokens for block, hit in zip(blocks, hits, strict=True) if not hit]
        placed = sum(self.footprint.block_bytes(block.tokens) for block in blocks)
        seconds = self.reuse_s(final.tokens, sum(block.tokens for block in blocks), placed)
        if computed:
            seconds += self.forward_s(sum(prefill_flops(self.config, one) for one in computed))
        if self.machine.gpu_bytes is not None:
            seconds += served.read_bytes / self.machine.transfer_bytes_per_s
        if from_disk:
            seconds += served.read_bytes / self.machine.disk_bytes_per_s
        return seconds


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of replaying a trace under one policy.

    Args:
        policy: The policy; see ``LABELS``.
        room_bytes: Capacity of the cache in bytes. None: no limit.
        passage_hits: Share of passage tokens that were reused. None: the trace has no passages.
        hits: Share of all tokens that were reused.
        computed_tokens: Mean number of tokens computed per request.
        read_bytes: Mean number of bytes of blocks read per request.
        from_disk: Whether the blocks exceed main memory, so that times include reading the disk.
        ttft_s, ttft_p95_s: Estimated time to first token in seconds, median and 95th percentile.
    """

    policy: Policy
    room_bytes: int | None
    passage_hits: float | None
    hits: float
    computed_tokens: float
    read_bytes: float
    from_disk: bool
    ttft_s: float
    ttft_p95_s: float


def replay(
    requests: Sequence[Request], policy: Policy, clock: ReplayClock, room_bytes: int | None = None
) -> Outcome:
    """Replay a trace under a policy.

    Args:
        policy: ``"full"`` computes everything, ``"prefix"`` has a prefix cache, and
            ``"prefix-sorted"`` also sorts the blocks (``PrefixCache.reordered``). ``"blocks"``
            reuses blocks, and ``"blocks-ingested"`` encodes all passages before the first request.
        room_bytes: Capacity of the cache in bytes. Default: no limit.
    """
    from_disk = False
    if policy in ("blocks", "blocks-ingested"):
        blocks = BlockCache(clock.footprint, room_bytes)
        if policy == "blocks-ingested":
            for passage in distinct_blocks(requests, "passage"):
                blocks.put(passage)
        served = [blocks.serve(request) for request in requests]
        from_disk = blocks.used_bytes > clock.block_room_bytes
        times = [clock.blocks_s(one, from_disk=from_disk) for one in served]
    else:
        room_pages = None if room_bytes is None else room_bytes // clock.page_bytes
        prefixes = PrefixCache(0 if policy == "full" else room_pages)
        if policy == "prefix-sorted":
            gains = _gains(requests)
            served = [prefixes.serve(prefixes.reordered(one, gains)) for one in requests]
        else:
            served = [prefixes.serve(request) for request in requests]
        times = [clock.prefix_s(one) for one in served]
    tokens, reused = _tokens(served)
    passages, reused_passages = _tokens(served, "passage")
    ttft_s, ttft_p95_s = np.quantile(times, [0.5, 0.95]).tolist()
    return Outcome(
        policy=policy,
        room_bytes=room_bytes,
        passage_hits=reused_passages / passages if passages else None,
        hits=reused / tokens,
        computed_tokens=(tokens - reused) / len(served),
        read_bytes=sum(one.read_bytes for one in served) / len(served),
        from_disk=from_disk,
        ttft_s=ttft_s,
        ttft_p95_s=ttft_p95_s,
    )


def _tokens(served: Sequence[Served], kind: str | None = None) -> tuple[int, int]:
    """Number of tokens in all segments, or in segments of one kind, and how many were reused."""
    found = [
        (segment.tokens, reused)
        for one in served
        for segment, reused in zip(one.request, one.reused, strict=True)
        if kind in (None, segment.kind)
    ]
    return sum(tokens for tokens, _ in found), sum(reused for _, reused in found)


def _gains(requests: Sequence[Request]) -> dict[str, int]:
    """Total number of tokens of each block over all requests, by block id."""
    gains: Counter[str] = Counter()
    for request in requests:
        for block in request[:-1]:
            gains[block.id] += block.tokens
    return gains


def plot_rooms(requests: Sequence[Request], clock: ReplayClock, file: Path) -> None:
    """Plot the share of reused passage tokens over the capacity of the cache.

    Args:
        clock: Provides the sizes of blocks.
        file: File to write. Its extension determines the format.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"plots need {missing_extra('matplotlib', 'train')}") from error
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    all_bytes = sum(
        clock.footprint.block_bytes(block.tokens) for block in distinct_blocks(requests)
    )
    rooms = [all_bytes >> halvings for halvings in range(5)]
    policies: list[Policy] = ["prefix", "prefix-sorted", "blocks"]
    for policy in policies:
        shares = [100 * (replay(requests, policy, clock, room).passage_hits or 0) for room in rooms]
        axes.plot([room / (1 << 30) for room in rooms], shares, marker="o", label=LABELS[policy])
    axes.set(xscale="log", ylim=(0, 100), xlabel="GiB of room", ylabel="% of passage tokens reused")
    axes.legend(loc="upper left")
    axes.grid(alpha=0.3)
    figure.savefig(file)
