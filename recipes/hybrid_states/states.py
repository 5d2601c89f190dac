"""Block mode for a hybrid model with gated delta networks, with several start states.

A batch is one dense, differentiable forward pass. Attention layers use the block mask. In a state
layer, a *run* is a sequence of tokens that one recurrence processes, starting from a zero state.
The final block starts from the state after the tokens that precede it in its run:

    full        one run over the complete prompt: full mode
    head        [head, final]: the package's block mode
    last        [sink, last passage, final]: the state stored with the last passage
    composed    [head, passages, final]: the head's state, through the affine map of each passage
    zero        [final]

Except in ``full``, each passage is a run ``[sink, passage]``. ``composed`` is equivalent to storing
one map per passage: a gated delta network computes S_t = A_t S_(t-1) + B_t, where A_t and B_t
depend only on the token's own input, and the inputs of a passage's tokens are those of
``[sink, passage]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus
from torch.nn.utils.rnn import pad_sequence
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5ForCausalLM,
    torch_chunk_gated_delta_rule,
)

from blockattn_rag.check.oracle import block_mask, layout_of
from recipes.hybrid_states.prompts import Prompt

Treatment = Literal["full", "head", "last", "composed", "zero"]
Run = list[int]
"""Indices of the tokens of a run, in order."""

CHUNK = 32


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts as tensors: ``b`` rows of ``n`` tokens, padded on the right.

    ``ids``, ``positions``: ``[b, n]``, int64. ``mask``: ``[b, 1, n, n]``, float32, additive.
    ``weights``: ``[b, n]``, float32, 1 for answer tokens.
    ``before``: ``[b * n, kernel]``, tokens that each token's convolution reads, the token last.
    ``runs``: ``[runs, longest]``. ``source``: ``[b * n]``, index of each token's output in the
    flattened runs. ``before`` and ``runs`` index the flattened batch; ``b * n`` is padding.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    weights: Tensor
    before: Tensor
    runs: Tensor
    source: Tensor


@dataclass(frozen=True, slots=True)
class _Row:
    ids: list[int]
    positions: Tensor
    mask: Tensor
    weights: list[float]
    convolutions: list[Run]
    recurrences: list[Run]  # later runs override the outputs of earlier ones


def _row(prompt: Prompt, treatment: Treatment, sink: Sequence[int], promote: int) -> _Row:
    head, *passages, final = prompt.blocks
    stored = len(passages) - min(promote, len(passages))
    if treatment == "full":
        stored, sink = 0, ()
    blocks = [head, *passages[:stored], [*chain(*passages[stored:]), *final]]
    lengths = [len(block) for block in blocks]
    layout = layout_of(lengths, len(sink))
    first, *middle, last = (
        (layout.block == number).nonzero()[:, 0].tolist() for number in range(len(blocks))
    )
    ids = [*head, *chain(*((*sink, *block) for block in blocks[1:-1])), *blocks[-1]]
    mask = block_mask([len(ids)] if treatment == "full" else lengths, sink_length=len(sink))
    runs = convolutions = _runs(treatment, first, middle, last)
    if treatment == "composed":
        convolutions = _runs("last", first, middle, last)
        runs = [[*first, *chain(*(run[len(sink) :] for run in middle)), *last], *middle]
    weights = [0.0] * (len(ids) - len(prompt.weights)) + prompt.weights
    return _Row(ids, layout.position, mask, weights, convolutions, runs)


def _runs(treatment: Treatment, first: Run, middle: list[Run], last: Run) -> list[Run]:
    if treatment == "zero":
        return [first, *middle, last]
    if treatment in ("last", "composed") and middle:
        return [first, *middle[:-1], [*middle[-1], *last]]
    return [[*first, *last], *middle]


def collate(
    prompts: Sequence[Prompt], treatment: Treatment, sink: Sequence[int], promote: int, kernel: int
) -> Batch:
    """Collate prompts to a batch.

    Args:
        sink: Token ids that passages are encoded after.
        promote: Number of passages that belong to the final block.
        kernel: Kernel size of the convolution in state layers.
    """
    rows = [_row(prompt, treatment, sink, promote) for prompt in prompts]
    n = max(len(row.ids) for row in rows)
    padding = len(rows) * n
    mask = torch.zeros(len(rows), 1, n, n, dtype=torch.bool)
    mask[..., torch.arange(n), torch.arange(n)] = True  # padding attends to itself
    before = torch.full((padding, kernel), padding)
    source = torch.zeros(padding, dtype=torch.long)
    runs: list[Tensor] = []
    longest = max(len(run) for row in rows for run in row.recurrences)
    for number, row in enumerate(rows):
        size = len(row.ids)
        mask[number, 0, :size, :size] = row.mask
        for run in row.convolutions:
            at = torch.tensor(run) + number * n
            for back in range(kernel):
                before[at[back:], kernel - 1 - back] = at[: len(at) - back]
        for run in row.recurrences:
            at = torch.tensor(run) + number * n
            source[at] = len(runs) * longest + torch.arange(len(at))
            runs.append(at)
    return Batch(
        ids=pad_sequence([torch.tensor(row.ids) for row in rows], batch_first=True),
        positions=pad_sequence([row.positions for row in rows], batch_first=True),
        mask=torch.zeros(mask.shape).masked_fill_(~mask, torch.finfo(torch.float32).min),
        weights=pad_sequence([torch.tensor(row.weights) for row in rows], batch_first=True),
        before=before,
        runs=pad_sequence(runs, batch_first=True, padding_value=padding),
        source=source,
    )


def hidden_states(model: Qwen3_5ForCausalLM, batch: Batch) -> Tensor:
    """Return the hidden states after the final norm, ``[b, n, hidden]``."""
    with _state_layers(model, batch):
        hidden: Tensor = model.model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=batch.mask,
            use_cache=False,
        ).last_hidden_state
    return hidden


@contextmanager
def _state_layers(model: Qwen3_5ForCausalLM, batch: Batch) -> Iterator[None]:
    mixers = [layer.linear_attn for layer in model.model.layers if hasattr(layer, "linear_attn")]
    for mixer in mixers:
        mixer.forward = partial(mix, mixer, batch)
    try:
        yield
    finally:
        for mixer in mixers:
            del mixer.forward


def mix(mixer: Any, batch: Batch, hidden_states: Tensor, **_: Any) -> Tensor:
    """Forward pass of a gated delta network, as in transformers, but separately for each run."""
    flat = hidden_states.flatten(0, 1)
    inputs = _with_padding(mixer.in_proj_qkv(flat))
    kernel = mixer.conv1d.weight[:, 0]
    mixed = sum(
        inputs[batch.before[:, place]] * kernel[:, place] for place in range(kernel.shape[1])
    )
    query, key, value = torch.split(
        _with_padding(silu(mixed))[batch.runs],
        [mixer.key_dim, mixer.key_dim, mixer.value_dim],
        dim=-1,
    )
    decay = -mixer.A_log.exp() * softplus(mixer.in_proj_a(flat) + mixer.dt_bias)
    outputs, _ = torch_chunk_gated_delta_rule(
        query.reshape(*query.shape[:2], -1, mixer.head_k_dim),
        key.reshape(*key.shape[:2], -1, mixer.head_k_dim),
        value.reshape(*value.shape[:2], -1, mixer.head_v_dim),
        g=_with_padding(decay)[batch.runs],
        beta=_with_padding(mixer.in_proj_b(flat).sigmoid())[batch.runs],
        chunk_size=CHUNK,
        use_qk_l2norm_in_kernel=True,
    )
    own = outputs.flatten(0, 1)[batch.source]
    gate = mixer.in_proj_z(flat).unflatten(-1, (-1, mixer.head_v_dim))
    normed = mixer.norm(own, gate).flatten(-2)
    output: Tensor = mixer.out_proj(normed).view_as(hidden_states)
    return output


def _with_padding(rows: Tensor) -> Tensor:
    return pad(rows, (0, 0, 0, 1))
