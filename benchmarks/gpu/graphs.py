"""Measure forward passes on the relay path as CUDA graphs and as single launches.

The same tokens follow the same context. One token is a step of decoding; 50 tokens are a question.
The limit is computed as in ``first_token``. Without graphs, both times are times of launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from first_token import BLOCK_TOKENS, LENGTHS, SHAPES, Prompt, limit_s
from harness import Campaign, Case, Record, elapsed_s, random_ids
from measuring import in_turns

TOKENS = (50, 1, 512)
"""Tokens of the forward passes."""


def cases(campaign: Campaign) -> Iterator[Case]:
    shapes, lengths = (("tiny",), (64,)) if campaign.dry else (SHAPES, LENGTHS[:2])
    for shape in shapes:
        for length in lengths:
            for tokens in TOKENS:
                run = partial(replayed, campaign, shape, length, tokens)
                yield Case(f"{shape}/{length}/{tokens} tokens", run)


def replayed(campaign: Campaign, shape: str, length: int, tokens: int) -> Record:
    """``graphs_s`` and ``launches_s`` of a forward pass, ``limit_s``, and ``has_graphs``."""
    model = campaign.model(shape, max(LENGTHS) + 1024)
    context = Prompt.drawn(model, length, min(BLOCK_TOKENS, length // 2)).context
    ids = torch.tensor(random_ids([tokens], model.config.vocab_size))
    runner = model.graph_runner

    def forward_s(captures: bool) -> float:
        if runner is not None:
            runner.captures = captures
        cache = model.cache_for(context, assembly="relay")
        model.next_logits(ids[:, :1], cache)  # This loads the context's tables.
        return elapsed_s(partial(model.next_logits, ids, cache), model.device)

    ways = {"launches": partial(forward_s, False), "graphs": partial(forward_s, True)}
    row = in_turns(ways, campaign.repeats)
    limit = limit_s(model, campaign.ceilings, "relay", length, tokens)
    # A failed capture turns graphs off.
    return row | {"limit_s": limit, "has_graphs": runner is not None and runner.captures}
