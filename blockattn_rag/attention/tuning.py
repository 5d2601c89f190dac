"""Machine constants: what is fastest on one type of device. None of them changes a result by more
than rounding.

Beside each stands the benchmark that measures it, or that it was reasoned and not measured. Figures
of benchmarks/attention.py came from trials before that script was there, and were not kept.
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
        matmul_rows, matmul_keys: query rows for which, over as many keys at least, matrix products
            beat the fused kernel.
        online_rows: query rows up to which the online softmax beats partial results and a merge.
        most_scores: scores of one block that matrix products and the online softmax may hold.
        least_log_weight: logarithms of softmax weights below this are raised to it.
        packed_rows: rows of input for which packed weights beat plain ones.
    """

    join_prefill_tokens: int
    join_decode_tokens: int
    relay_final_tokens: int
    encode_batch_tokens: int
    matmul_rows: range = range(0)
    matmul_keys: int = 0
    online_rows: int = 0
    most_scores: int = 0
    least_log_weight: float = 0.0
    packed_rows: range = range(0)


CPU = Tuning(
    # One more block costs 30 to 40 microseconds a layer in calls, whatever its size. A prompt is
    # read in one pass, an answer in one for each token (benchmarks/attention.py, "joined").
    join_prefill_tokens=32,
    join_decode_tokens=512,  # `bench decode --block-tokens 128,512` as well
    relay_final_tokens=1024,  # benchmarks/attention.py, "final"
    encode_batch_tokens=2048,  # `bench ingest`: enough to keep the matrix products large
    # The fused kernel works on 32 rows at a time (benchmarks/attention.py, "kernels").
    matmul_rows=range(16, 192),
    matmul_keys=512,
    online_rows=384,  # benchmarks/attention.py, "strategies"
    most_scores=1 << 24,  # 64 MiB in float32; a bound on memory, reasoned
    # Exponentials that are denormal numbers take some fifty times as long; e-60 is below rounding.
    least_log_weight=-60.0,  # benchmarks/attention.py, "denormal"
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
