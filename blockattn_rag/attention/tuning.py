"""Machine constants: what is fastest on one type of device. None of them changes a result by more
than rounding.

Each names the benchmark that measured it, or says that it was estimated. Matrix products in place
of the fused kernel, and a running softmax in place of merged parts, were slower or no faster on an
AMD EPYC with AVX-512 and torch 2.13 (0.5 to 0.8 times the fused kernel's speed) and are gone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is fastest on one type of device. Ranges and lengths that are empty take nothing.

    Args:
        join_prefill_tokens, join_decode_tokens: blocks of fewer tokens are joined to segments of
            as many, for the queries of a prompt and of an answer's single tokens. Joined blocks are
            copies, which live as long as the answer takes.
        relay_final_tokens: final blocks of more tokens take the copy path, because rotating their
            queries for every block costs more than rotating the keys once.
        encode_batch_tokens: tokens of one encoding batch, padding included.
        packed_rows: rows of input for which packed weights beat plain ones.
    """

    join_prefill_tokens: int
    join_decode_tokens: int
    relay_final_tokens: int
    encode_batch_tokens: int
    packed_rows: range = range(0)


CPU = Tuning(
    # One more block costs 30 to 40 microseconds a layer in calls, whatever its size. A prompt is
    # read in one pass, an answer in one for each token.
    join_prefill_tokens=32,
    join_decode_tokens=512,  # `bench decode --block-tokens 128,512` as well
    relay_final_tokens=1024,  # above it, rotating the keys once is faster
    encode_batch_tokens=2048,  # `bench ingest`: enough to keep the matrix products large
    packed_rows=range(4, 256),  # benchmarks/packing.py
)

ACCELERATOR = Tuning(  # all reasoned from the cost of launching kernels, none measured yet
    join_prefill_tokens=8192,
    join_decode_tokens=8192,
    relay_final_tokens=1024,
    encode_batch_tokens=16384,
)


def tuning_of(device: torch.device) -> Tuning:
    """The constants of a device's type."""
    return CPU if device.type == "cpu" else ACCELERATOR
