"""Induction heads, set by hand before training.

"What followed this token the last time?" and "what followed words like these?" are the circuits
that every look-up in a prompt builds on. From a random start, a model this small spends many
minutes on a plateau before it finds these circuits. So layer 0 starts with heads that write down,
beside each token, which token came before it and which tokens stood around it. Layer 1 starts with
induction heads: they attend to where the same token, or much the same words, stood before, and copy
what came next. Of several such places the heads prefer the nearest, because a later edition
supersedes an earlier one. All these weights are trained on like any others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

CONSTANT = 3.0  # of the constant direction, in units of the embedding's standard deviation
RECENT_PAIRS, RECENCY = slice(17, 21), 1.0  # preference for near places: 4.0 blinds to far ones
MATCH_PAIRS = 12  # rotary pairs, the slowest ones, over which identities are compared


@torch.no_grad()
def set_induction_heads(model: LlamaForCausalLM) -> None:
    """Set the embeddings and the first heads of layers 0 and 1.

    Needs two key-value heads and four query heads: the first of each copies after one token,
    the others after a handful.
    """
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    hidden, size = model.config.hidden_size, int(first.head_dim)
    std = model.config.initializer_range
    frequencies = model.model.rotary_emb.inv_freq.float()
    embedding = model.model.embed_tokens.weight
    # One direction that is the same for all tokens: attention by position alone reads it.
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
    # A place that follows certain words sees them earlier than one that is about to go on.
    _match(queries[2], keys[1], around, earlier, sharpness=50.0)
    _route(values[1], outputs[2], content, content, 8 * std)
    for head in (*queries, *keys):
        # Adds up, over slow rotary pairs, to a score that falls for some 600 positions.
        head[RECENT_PAIRS, 0] += RECENCY


def _heads(attention: torch.nn.Module, size: int) -> list[tuple[Tensor, ...]]:
    """Views of the weights by head: queries, keys and values ``[head_dim, hidden]``, outputs
    ``[hidden, head_dim]``."""
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
    """Score positions by how near to ``distance`` back they are, whatever stands there.

    The score is the sum of cos((i - j - distance) * frequency) over the rotary ``pairs``: the
    faster they are, the narrower the peak.
    """
    half = len(query) // 2
    turned = slice(pairs.start + half, pairs.stop + half)
    amplitude = math.sqrt(sharpness)
    query[:] = 0  # but not the keys: where both are 0, neither gets a gradient, ever
    key[pairs] = key[turned] = 0
    key[pairs, 0] = amplitude
    query[pairs, 0] = amplitude * (distance * frequencies[pairs]).cos()
    query[turned, 0] = -amplitude * (distance * frequencies[pairs]).sin()


def _match(query: Tensor, key: Tensor, wanted: Tensor, found: Tensor, *, sharpness: float) -> None:
    """Score positions by how well what is written in ``found`` there equals ``wanted`` here.

    Only the slowest rotary pairs are used: there, position hardly matters.
    """
    half = len(query) // 2
    rows = torch.cat([torch.arange(end - MATCH_PAIRS, end) for end in (half, 2 * half)])
    scale = math.sqrt(sharpness * math.sqrt(len(query)) / len(rows))
    query[:] = 0
    query[rows] = scale * wanted
    key[rows] = scale * found


def _route(value: Tensor, output: Tensor, source: Tensor, target: Tensor, scale: float) -> None:
    """Let a head read the directions ``source`` and write them as ``target``, ``[n, hidden]``."""
    output[:] = 0  # but not the values: where both are 0, neither gets a gradient, ever
    value[: len(source)] = source
    output[:, : len(target)] = scale * target.T
