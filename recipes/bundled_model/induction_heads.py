"""Induction heads, set by hand before training.

Lookups in a prompt need circuits that answer "What followed this token the last time?" and "What
followed similar words?". From a random initialization, the loss of such a small model stays on a
plateau for many minutes before these circuits form. Layer 0 therefore starts with heads that record
the previous token and the surrounding tokens of each token. Layer 1 starts with induction heads:
they attend to earlier occurrences of the same token or of similar words, and copy the next token.
They prefer the most recent occurrence, because a later edition supersedes an earlier one. All of
these weights are trained further, like all others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CONSTANT = 3.0  # constant direction, in units of the embedding's standard deviation
RECENT_PAIRS, RECENCY = slice(17, 21), 1.0  # preference for recency: 4.0 hides distant matches
MATCH_PAIRS = 12  # number of rotary pairs (the slowest) that are used to compare identities


@torch.no_grad()
def set_induction_heads(model: LlamaForCausalLM) -> None:
    """Initialize the embeddings and the first heads of layers 0 and 1.

    The model needs two key-value heads and four query heads. The first heads match a single token,
    the others several tokens.
    """
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    hidden, size = model.config.hidden_size, int(first.head_dim)
    std = model.config.initializer_range
    frequencies = model.model.rotary_emb.inv_freq.float()
    embedding = model.model.embed_tokens.weight
    # One direction is the same for all tokens, so that heads can attend by position alone.
    embedding[:, 0] = CONSTANT * std
    model.lm_head.weight.copy_(embedding)
    model.lm_head.weight[:, 0] = 0

    basis, _ = torch.linalg.qr(torch.randn(hidden - 1, hidden - 1))
    directions = torch.cat([torch.zeros(hidden - 1, 1), basis], dim=1)  # orthonormal rows
    width = 2 * MATCH_PAIRS
    identity, previous, around, earlier = torch.split(directions[: 4 * width], width)
    content = directions[4 * width :][:size]

    queries, keys, values, outputs = _heads(first, size)
    _attend_back(queries[0], keys[0], frequencies, pairs=slice(0, 12), distance=1, sharpness=6.0)
    _route(values[0], outputs[0], identity, previous, 3 * std)
    _attend_back(queries[2], keys[1], frequencies, pairs=slice(2, 10), distance=3, sharpness=0.64)
    _attend_back(queries[3], keys[1], frequencies, pairs=slice(2, 10), distance=5, sharpness=0.64)
    _route(values[1], outputs[2], identity, around, 8 * std)
    _route(values[1], outputs[3], identity, earlier, 8 * std)

    queries, keys, values, outputs = _heads(second, size)
    _match(queries[0], keys[0], identity, previous, sharpness=30.0)
    _route(values[0], outputs[0], content, content, 8 * std)
    # The same words are farther back for the token to copy than for the token to predict from.
    _match(queries[2], keys[1], around, earlier, sharpness=50.0)
    _route(values[1], outputs[2], content, content, 8 * std)
    for head in (*queries, *keys):
        # Over slow rotary pairs, these add up to a score that decreases for about 600 positions.
        head[RECENT_PAIRS, 0] += RECENCY


def _heads(attention: torch.nn.Module, size: int) -> list[tuple[Tensor, ...]]:
    """Return views of the weights per head: queries, keys and values ``[head_dim, hidden]``,
    outputs ``[hidden, head_dim]``."""
    weights = dict(attention.named_parameters())
    by_row = [torch.split(weights[f"{name}_proj.weight"], size) for name in "qkv"]
    return [*by_row, torch.split(weights["o_proj.weight"], size, dim=1)]


def _attend_back(
    query: Tensor,
    key: Tensor,
    frequencies: Tensor,
    *,
    pairs: slice,
    distance: int,
    sharpness: float,
) -> None:
    """Make a head attend to positions around ``distance`` tokens back, regardless of content.

    The score is the sum of cos((i - j - distance) * frequency) over the rotary ``pairs``. Higher
    frequencies make its peak narrower.
    """
    half = len(query) // 2
    turned = slice(pairs.start + half, pairs.stop + half)
    amplitude = math.sqrt(sharpness)
    query[:] = 0  # but not the keys: if both are 0, neither ever receives a gradient
    key[pairs] = key[turned] = 0
    key[pairs, 0] = amplitude
    query[pairs, 0] = amplitude * (distance * frequencies[pairs]).cos()
    query[turned, 0] = -amplitude * (distance * frequencies[pairs]).sin()


def _match(query: Tensor, key: Tensor, wanted: Tensor, found: Tensor, *, sharpness: float) -> None:
    """Make a head attend to positions whose ``found`` features match the query's ``wanted`` ones.

    Only the slowest rotary pairs are used, because they depend least on the position.
    """
    half = len(query) // 2
    rows = torch.cat([torch.arange(end - MATCH_PAIRS, end) for end in (half, 2 * half)])
    scale = math.sqrt(sharpness * math.sqrt(len(query)) / len(rows))
    query[:] = 0
    query[rows] = scale * wanted
    key[rows] = scale * found


def _route(value: Tensor, output: Tensor, source: Tensor, target: Tensor, scale: float) -> None:
    """Make a head copy the directions ``source`` to ``target``, both ``[n, hidden]``."""
    output[:] = 0  # but not the values: if both are 0, neither ever receives a gradient
    value[: len(source)] = source
    output[:, : len(target)] = scale * target.T
