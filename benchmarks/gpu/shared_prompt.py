"""Compare the throughput gain of a shared system prompt with RelayAttention's equation 10.

32 requests share 2,048 tokens. Each has 128 additional tokens and generates 32. ``shared`` reads
the system prompt once for all requests; in ``unshared``, every request has a copy.

Equation 10 of RelayAttention (Zhu et al., 2024, arXiv 2402.14808) compares the keys and values that
attention reads. With b requests, s shared tokens and c separate tokens per request, its leading
terms are::

    gain <= b (s + c) / (s + b c)

This covers only attention. Each step also reads the weights once. With W bytes of weights and k
bytes of keys and values per token::

    gain <= (W + k b (s + c)) / (W + k (s + b c))
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from efficiency import measure_shared
from first_token import weight_bytes
from harness import Campaign, Case, Record

SHAPES, BATCHES = ("8b", "1b"), (32, 8)
SYSTEM_TOKENS, CONTEXT_TOKENS, FINAL_TOKENS, NEW_TOKENS = 2_048, 128, 16, 32


def cases(campaign: Campaign) -> Iterator[Case]:
    shapes, batches = (("tiny",), (2,)) if campaign.dry else (SHAPES, BATCHES)
    for shape in shapes:
        for batch in batches:
            yield Case(f"{shape}/{batch} requests", partial(shared, campaign, shape, batch))


def shared(campaign: Campaign, shape: str, batch: int) -> Record:
    """Return a row of ``measure_shared`` with ``bytes_ratio`` (equation 10) and ``limit_gain``."""
    system, context, new = SYSTEM_TOKENS, CONTEXT_TOKENS, NEW_TOKENS
    if campaign.dry:
        system, context, new = 32, 8, 4
    model = campaign.model(shape, 4 * SYSTEM_TOKENS)
    (row,) = measure_shared(
        campaign.engine(model),
        [batch],
        system_tokens=[system],
        context_tokens=context,
        question_tokens=FINAL_TOKENS,
        new_tokens=new,
        repeats=min(campaign.repeats, 3),
    )
    weights, token = weight_bytes(model), model.bytes_per_token
    own = context + FINAL_TOKENS + new / 2  # mean over the steps
    unshared_bytes = weights + token * batch * (system + own)
    shared_bytes = weights + token * (system + batch * own)
    return row | {"limit_gain": unshared_bytes / shared_bytes}
