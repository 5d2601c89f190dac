"""Replay a log of requests, and estimate the savings from prefix caching and block reuse.

    python benchmarks/replay.py requests.jsonl --model 8b --dtype bfloat16 --tflops 1 --room 16

A log is a JSON Lines file with one request per line. Segments are in prompt order::

    {"segments": [{"id": "rules", "tokens": 212, "kind": "system"},
                  {"id": "doc-17", "tokens": 254, "kind": "passage"},
                  {"id": "q-1", "tokens": 19, "kind": "question"}]}

Segments with the same id have the same text. Segments of kind ``passage`` are passages; other kinds
are not distinguished. The last segment is the final block, and all others are context blocks.

The script compares these policies:

- ``prefix``: a prefix cache as in vLLM, with prompts in their original order.
- ``prefix-sorted``: the same cache, with sorted blocks. Blocks that continue the longest cached
  prefix come first, then the others by their total number of tokens in the log (as in
  ContextPilot, but with knowledge of later requests). System prompts and history are also sorted,
  as if their order did not affect answers.
- ``blocks``: block reuse, starting with an empty store.
- ``blocks-ingested``: block reuse, with all passages encoded in advance.

Times to first token are estimates for one request at a time. They favor prefix caching: its pages
are always on the device, whereas blocks are read from main memory, or from disk if they exceed
``--memory``. Answers take no space. The result is printed as JSON.

With ``--first 1 --first 10``, passages are ranked by their use in the first half of the log. The
most used 1 % or 10 % of all passages are encoded in advance, and the second half is replayed twice:
without a size limit, so that the other passages are encoded on first use and kept, and with space
for only the passages that were encoded in advance.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
import typer

from blockattn_rag.errors import DataError
from blockattn_rag.lab.json_lines import JsonRecord, parsed_lines
from blockattn_rag.lab.planning import (
    Footprint,
    Machine,
    floating_type,
    footprint,
    prefill_flops,
    shape_config,
)

GIB = 1 << 30
PAGE_TOKENS = 16
"""Number of tokens per page of the prefix cache, as in vLLM by default."""
_BEAM = 8
"""Width of the beam search for the longest cached prefix."""

Policy = Literal["full", "prefix", "prefix-sorted", "blocks", "blocks-ingested"]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt.

    Args:
        id: Identifier of the text.
        tokens: Number of tokens.
        kind: ``"passage"``, or any other string.
    """

    id: str
    tokens: int
    kind: str


Request = tuple[Segment, ...]


def read_log(path: Path) -> list[Request]:
    """Read a log. To save memory, requests share the objects of equal segments.

    Raises:
        DataError: The file is missing, damaged or empty, a line is not a JSON object, or an id has
            different numbers of tokens. The message contains the file and the line.
    """
    known: dict[str, Segment] = {}
    return [request for _, request in parsed_lines(path, lambda line, _: _request(line, known))]


def _request(record: JsonRecord, known: dict[str, Segment]) -> Request:
    parts = [Segment(part["id"], part["tokens"], part["kind"]) for part in record["segments"]]
    for part in parts:
        if (first := known.setdefault(part.id, part)).tokens != part.tokens:
            raise DataError(
                f"found {part.tokens} tokens for the id {part.id!r}, which had {first.tokens} "
                "before; give each text its own id"
            )
    return tuple(known[part.id] for part in parts)


def distinct_blocks(requests: Sequence[Request], kind: str | None = None) -> list[Segment]:
    """Return the distinct context blocks of a log, or only those of one kind."""
    blocks = {block.id: block for request in requests for block in request[:-1]}
    return [block for block in blocks.values() if kind in (None, block.kind)]


@dataclass(frozen=True, slots=True)
class Served:
    """Result of looking up a request in a cache.

    Args:
        request: The request.
        reused: Number of reused tokens in each segment.
        read_bytes: Size of the blocks that were read, in bytes.
    """

    request: Request
    reused: Sequence[int]
    read_bytes: int = 0


@dataclass(slots=True)
class _Run:
    number: int
    pages: int = 0


class PrefixCache:
    """Prefix cache as in vLLM: pages of 16 tokens, with LRU eviction.

    A page is reused if an earlier request had the same tokens up to the end of the page. The last
    token of a request is always computed. The pages of a request are evicted from last to first.
    Only full pages of prompts take space. vLLM also needs space for answers and partial pages, so
    the simulation slightly favors the prefix cache.

    Pages are counted in runs. A run consists of the pages that end in the same segment after the
    same prefix. They are always used together, so counting runs is exact, and time and memory
    depend on the number of segments, not of pages.

    Args:
        room_pages: Maximum number of pages. Default: no limit.
    """

    def __init__(self, room_pages: int | None = None) -> None:
        self._room_pages = room_pages
        self._used_pages = 0
        # Keys: number of the preceding run, id of the segment. Order: least recently used first.
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

        A beam search finds the blocks that form the longest cached prefix, which come first. The
        other blocks follow in descending order of gain.

        Args:
            request: The request. Its last segment remains last.
            gains: Benefit of putting a block early in a prompt, by block id.
        """
        blocks = sorted(request[:-1], key=lambda block: -gains[block.id])
        best: tuple[int, ...] = ()
        # Each candidate: number of pages, run, and blocks.
        beam: list[tuple[int, int, tuple[int, ...]]] = [(0, 0, ())]
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
    """Store of blocks, with LRU eviction.

    Args:
        footprint: Size of the model's keys and values.
        room_bytes: Capacity in bytes. Larger blocks are not stored. Default: no limit.
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
class ReplayClock:
    """Estimates the time to first token of a served request.

    Args:
        config: Config of a model with gated feed-forward layers.
        footprint: Size of the model and of its keys and values.
        machine: The machine. Without a GPU, blocks are in the memory that is not used by weights.
    """

    config: Any
    footprint: Footprint
    machine: Machine

    @property
    def page_bytes(self) -> int:
        """Size of a page of the prefix cache in bytes."""
        return PAGE_TOKENS * self.footprint.bytes_per_token

    def prefix_s(self, served: Served) -> float:
        """Return the seconds with a prefix cache on the device."""
        cached = sum(served.reused)
        new = sum(segment.tokens for segment in served.request) - cached
        return self._prefill_s(new, cached)

    def blocks_s(self, served: Served, *, from_disk: bool) -> float:
        """Return the seconds if blocks are read from memory or disk, or encoded."""
        *blocks, final = served.request
        hits = [tokens > 0 for tokens in served.reused[:-1]]
        computed = [block.tokens for block, hit in zip(blocks, hits, strict=True) if not hit]
        seconds = self._prefill_s(final.tokens, sum(block.tokens for block in blocks))
        if computed:
            operations = sum(prefill_flops(self.config, tokens) for tokens in computed)
            seconds += self.machine.forward_s(operations, self.footprint.weight_bytes)
        if from_disk:
            seconds += served.read_bytes / self.machine.disk_bytes_per_s
        return seconds

    def _prefill_s(self, new_tokens: int, cached_tokens: int) -> float:
        """Return the seconds of a prefill that reads the keys and values of cached tokens."""
        read = self.footprint.weight_bytes + cached_tokens * self.footprint.bytes_per_token
        return self.machine.forward_s(prefill_flops(self.config, new_tokens, cached_tokens), read)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of replaying a log under one policy.

    Args:
        policy: The policy; see the module docstring.
        room_bytes: Capacity of the cache in bytes. None: no limit.
        passage_hits: Share of passage tokens that were reused. None: the log has no passages.
        hits: Share of all tokens that were reused.
        computed_tokens: Mean number of tokens computed per request.
        read_bytes: Mean number of bytes of blocks read per request.
        from_disk: Whether the blocks exceed main memory, so that times include disk reads.
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
    """Replay a log under a policy.

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
        from_disk = blocks.used_bytes > clock.machine.memory_bytes - clock.footprint.weight_bytes
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


@dataclass(frozen=True, slots=True)
class FirstOutcome:
    """Result of encoding the most used passages in advance, and the others on first use.

    Args:
        share: Share of all passages that were encoded in advance.
        encoded_bytes: Size of these passages in bytes.
        passage_hits: Share of passage tokens that were reused without a size limit.
        stored_bytes: Size of all stored passages at the end, in bytes.
        bounded_hits: Share of passage tokens that were reused with a limit of ``encoded_bytes``.
    """

    share: float
    encoded_bytes: int
    passage_hits: float
    stored_bytes: int
    bounded_hits: float


def replay_first(requests: Sequence[Request], share: float, footprint: Footprint) -> FirstOutcome:
    """Replay the passages in the second half of a log, after encoding a share of all passages.

    Passages are ranked by their use in the first half. Unused passages come last, in log order. The
    store has only passages: system prompts and history are in memory.

    Args:
        share: Share of all passages to encode in advance, from 0 to 1.
    """
    middle = len(requests) // 2
    past, future = requests[:middle], [_passages(request) for request in requests[middle:]]
    uses = Counter(block.id for request in past for block in request[:-1])
    passages = sorted(distinct_blocks(requests, "passage"), key=lambda one: -uses[one.id])
    first = passages[: round(share * len(passages))]
    encoded = sum(footprint.block_bytes(passage.tokens) for passage in first)
    hits = []
    for room in (None, encoded):
        blocks = BlockCache(footprint, room)
        for passage in reversed(first):  # so that the most used passage is evicted last
            blocks.put(passage)
        tokens, reused = _tokens([blocks.serve(request) for request in future], "passage")
        hits.append((reused / tokens, blocks.used_bytes))
    return FirstOutcome(share, encoded, *hits[0], hits[1][0])


def _passages(request: Request) -> Request:
    """Return the request with only its passages and its final block."""
    return (*(block for block in request[:-1] if block.kind == "passage"), request[-1])


def _tokens(served: Sequence[Served], kind: str | None = None) -> tuple[int, int]:
    """Count the tokens in all segments, or in segments of one kind, and how many were reused."""
    found = [
        (segment.tokens, reused)
        for one in served
        for segment, reused in zip(one.request, one.reused, strict=True)
        if kind in (None, segment.kind)
    ]
    return sum(tokens for tokens, _ in found), sum(reused for _, reused in found)


def _gains(requests: Sequence[Request]) -> dict[str, int]:
    """Return the total number of tokens of each block over all requests, by block id."""
    gains: Counter[str] = Counter()
    for request in requests:
        for block in request[:-1]:
            gains[block.id] += block.tokens
    return gains


def main(
    log: Annotated[Path, typer.Argument(help="Log of requests, .jsonl or .jsonl.gz.")],
    model: Annotated[str, typer.Option(help="Llama shape.")] = "8b",
    dtype: Annotated[str, typer.Option(help="Data type of keys and values.")] = "bfloat16",
    tflops: Annotated[float, typer.Option(help="Compute speed in TFLOPS.")] = 1.0,
    memory: Annotated[float, typer.Option(help="Main memory in GiB.")] = 64.0,
    room: Annotated[
        float | None, typer.Option(help="Also replay with caches of this size in GiB.")
    ] = None,
    first: Annotated[
        list[float] | None,
        typer.Option(help="Percentage of passages to encode in advance. Repeatable."),
    ] = None,
) -> None:
    """Replay a log under all policies, and print the results as JSON."""
    requests, config = read_log(log), shape_config(model)
    if first:
        sizes = footprint(config, floating_type(dtype))
        found = [asdict(replay_first(requests, percent / 100, sizes)) for percent in first]
        print(json.dumps({"requests": len(requests), "first": found}))
        return
    machine = Machine(int(memory * GIB), 1 << 50, operations_per_s=1e12 * tflops)
    clock = ReplayClock(config, footprint(config, floating_type(dtype)), machine)
    rooms = [None] if room is None else [None, int(room * GIB)]
    outcomes = [
        asdict(replay(requests, policy, clock, room_bytes))
        for room_bytes in rooms
        for policy in get_args(Policy)
        if policy != "full" or room_bytes is None
    ]
    print(json.dumps({"requests": len(requests), "outcomes": outcomes, "machine": asdict(machine)}))


if __name__ == "__main__":
    typer.run(main)
