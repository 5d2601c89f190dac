"""Encoding: computes the keys and values of blocks in batches, at positions 0..n-1."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.rope import Angles, RotaryLayout, rotate
from blockattn_rag.model.kinds import layer_states, new_cache
from blockattn_rag.model.probe import AttentionProfile, check_ready


class EncodeRequest(NamedTuple):
    """Block to encode: its token ids, the digest and handle of its KV, and its sink's token ids."""

    token_ids: list[int]
    digest: str
    handle: str
    sink_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute, including the sink."""
        return len(self.sink_ids) + len(self.token_ids)


def batches(
    requests: Sequence[EncodeRequest], budget: int, limit: int
) -> Iterator[list[EncodeRequest]]:
    """Group blocks into batches of similar length, longest first: up to ``budget`` tokens with
    padding, or one block. Raises ``ContextOverflowError`` if a block exceeds ``limit`` tokens."""
    order = sorted(requests, key=lambda request: -request.num_tokens)
    if order and order[0].num_tokens > limit:
        first = order[0]
        sink = f" after a sink of {len(first.sink_ids)} tokens" if first.sink_ids else ""
        raise ContextOverflowError(
            f"A block has {len(first.token_ids)} tokens{sink}, but the model accepts at most "
            f"{limit}: split the passage into smaller chunks{', or shorten the sink' * bool(sink)}"
        )
    while order:
        width = order[0].num_tokens
        most, least = max(1, budget // width), max(1, budget // 8 // width)
        # Once an eighth of the budget is filled, blocks shorter than 9/10 of the longest go to the
        # next batch, because padding would cost more than a smaller batch.
        alike = sum(10 * request.num_tokens >= 9 * width for request in order[:most])
        rows = max(alike, least)
        yield order[:rows]
        order = order[rows:]


@torch.inference_mode()
def encode_batch(
    hf_model: PreTrainedModel,
    batch: Sequence[EncodeRequest],
    fingerprint: str,
    profile: AttentionProfile,
) -> list[BlockKV]:
    """Encode blocks in one forward pass. Causal attention ignores the padding on the right.

    The ``s`` tokens of a sink come first, at positions 0..s-1, and the block's keys are rotated
    back by ``s`` positions afterwards. The sink cannot have negative positions instead, because
    some models scale attention by position.
    """
    check_ready(hf_model)
    rows = [torch.tensor([*request.sink_ids, *request.token_ids]) for request in batch]
    ids = pad_sequence(rows, batch_first=True)
    # Keep tokens beyond sliding windows: windows end with the padding here, but in a prompt, the
    # final block may directly follow the block.
    cache = new_cache(hf_model.config)
    hf_model(
        input_ids=ids.to(hf_model.device),
        past_key_values=cache,
        use_cache=True,
        **logits_to_keep(hf_model),
    )
    states, layouts = [*layer_states(cache, profile.kinds)], profile.layouts
    return [
        _cut_out(states, row, request, fingerprint, layouts) for row, request in enumerate(batch)
    ]


def logits_to_keep(
    hf_model: PreTrainedModel, count: int = 1, *, computes_all: bool = False
) -> dict[str, Any]:
    """Argument for ``forward`` that limits logits to the last tokens. Empty if unsupported.

    Unless ``computes_all``, layers that store no keys and values may compute only these tokens.
    """
    if "logits_to_keep" not in inspect.signature(hf_model.forward).parameters:
        return {}
    # Models skip tokens only if the argument is a number.
    return {"logits_to_keep": torch.arange(-count, 0) if computes_all else count}


def _cut_out(
    states: Sequence[tuple[Tensor, Tensor]],
    row: int,
    request: EncodeRequest,
    fingerprint: str,
    layouts: Sequence[RotaryLayout],
) -> BlockKV:
    """Copy the block of one row. A view would keep the complete batch in memory."""
    own = slice(len(request.sink_ids), request.num_tokens)
    angles: Angles = {}
    keys, values = [], []
    for index, layout in enumerate(layouts):
        own_keys, own_values = (tensor[row, :, own] for tensor in states[index])
        if request.sink_ids and layout.rotates:
            if layout not in angles:
                angles[layout] = layout.cos_sin(-len(request.sink_ids), own_keys.device)
            own_keys = rotate(own_keys, *angles[layout], layout)
        keys.append(own_keys.clone())
        values.append(own_values.clone())
    return BlockKV(
        keys=tuple(keys),
        values=tuple(values),
        token_ids=torch.tensor(request.token_ids, dtype=torch.long),
        fingerprint=fingerprint,
        digest=request.digest,
        handle=request.handle,
    )
