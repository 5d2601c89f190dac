"""Measure forward passes on the relay path, as CUDA graphs and with separate kernel launches.

Both compute the same tokens after the same context: one token, as in a decoding step, or 50 tokens,
as in a question. The limit is calculated as in ``first_token``. If the model has no graphs, both
times are those of separate launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from first_token import BLOCK_TOKENS, LENGTHS, SHAPES, Prompt, limit_s
from harness import Campaign, Case, Record, elapsed_s, random_ids
from measuring import in_turns

TOKENS = (50, 1, 512)
"""Numbers of tokens in the forward passes."""


def cases(campaign: Campaign) -> Iterator[Case]:
    shapes, lengths = (("tiny",), (64,)) if campaign.dry else (SHAPES, LENGTHS[:2])
    for shape in shapes:
        for length in lengths:
            for tokens in TOKENS:
                run = partial(replayed, campaign, shape, length, tokens)
                yield Case(f"{shape}/{length}/{tokens} tokens", run)


def replayed(campaign: Campaign, shape: str, length: int, tokens: int) -> Record:
    """Measure ``graphs_s``, ``launches_s``, ``limit_s`` and ``has_graphs`` of a forward pass."""
    model = campaign.model(shape, max(LENGTHS) + 1024)
    context = Prompt.drawn(model, length, min(BLOCK_TOKENS, length // 2)).context
    ids = torch.tensor(random_ids([tokens], model.config.vocab_size))
    runner = model.graph_runner

    def forward_s(captures: bool) -> float:
        if runner is not None:
            runner.captures = captures
        cache = model.cache_for(context, assembly="relay")
        model.next_logits(ids[:, :1], cache)  # Load the tables of the context.
        return elapsed_s(partial(model.next_logits, ids, cache), model.device)

    ways = {"launches": partial(forward_s, False), "graphs": partial(forward_s, True)}
    row = in_turns(ways, campaign.repeats)
    limit = limit_s(model, campaign.ceilings, "relay", length, tokens)
    # If the capture failed, graphs are disabled.
    return row | {"limit_s": limit, "has_graphs": runner is not None and runner.captures}
