"""Encoding: blocks' keys and values at positions 0..n-1, several blocks in one forward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from blockattn_rag.errors import ContextOverflowError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.model.probe import check_ready, layer_states


class EncodeRequest(NamedTuple):
    """Tokens of one block, the digest and handle that its KV gets, and the tokens of its sink."""

    token_ids: list[int]
    digest: str
    handle: str
    sink_ids: Sequence[int] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens that must be computed."""
        return len(self.sink_ids) + len(self.token_ids)


def batches(
    requests: Sequence[EncodeRequest], budget: int, limit: int
) -> Iterator[list[EncodeRequest]]:
    """Blocks of similar length together, longest first, up to ``budget`` tokens with padding.

    Raises:
        ContextOverflowError: a block has more than ``limit`` tokens.
    """
    order = sorted(requests, key=lambda request: -request.num_tokens)
    if order and order[0].num_tokens > limit:
        raise ContextOverflowError(
            f"a block has {order[0].num_tokens} tokens, but the model holds at most {limit}; "
            "split the passage into smaller chunks"
        )
    while order:
        rows = _batch_rows([request.num_tokens for request in order], budget)
        yield order[:rows]
        order = order[rows:]


def _batch_rows(lengths: Sequence[int], budget: int) -> int:
    """How many of the blocks, longest first, make a batch: up to ``budget`` tokens with padding.

    Blocks below 9/10 of the longest wait for the next batch once an eighth of the budget is filled,
    because their padding costs more than a smaller batch does.
    """
    width = lengths[0]
    most, least = max(1, budget // width), max(1, budget // 8 // width)
    alike = sum(10 * length >= 9 * width for length in lengths[:most])
    return min(most, len(lengths), max(alike, least))


@torch.inference_mode()
def encode_batch(
    hf_model: PreTrainedModel, batch: Sequence[EncodeRequest], fingerprint: str
) -> list[BlockKV]:
    """The blocks' KV from one forward, padded on the right, which a causal mask makes harmless.

    The tokens of a block's sink stand before it, at negative positions, so that the block's own
    begin at 0.

    Raises as ``check_ready``.
    """
    check_ready(hf_model)
    rows = [torch.tensor([*request.sink_ids, *request.token_ids]) for request in batch]
    ids = pad_sequence(rows, batch_first=True)
    # Without the config the cache keeps all tokens of sliding-window layers too: the block may come
    # to stand right before the final block, or anywhere else.
    cache = DynamicCache()
    hf_model(
        input_ids=ids.to(hf_model.device),
        past_key_values=cache,
        use_cache=True,
        **_positions(hf_model, batch, ids.shape[1]),
        **logits_to_keep(hf_model),
    )
    states = layer_states(cache)
    return [_cut_out(states, row, request, fingerprint) for row, request in enumerate(batch)]


def _positions(
    hf_model: PreTrainedModel, batch: Sequence[EncodeRequest], width: int
) -> dict[str, Tensor]:
    """Positions of each row's tokens, if they are other than the model takes by itself."""
    sinks = torch.tensor([len(request.sink_ids) for request in batch])
    if not sinks.any():
        return {}
    return {"position_ids": (torch.arange(width) - sinks[:, None]).to(hf_model.device)}


def logits_to_keep(hf_model: PreTrainedModel, count: int = 1) -> dict[str, Any]:
    """The argument by which a forward computes the last tokens' logits alone, if it has one."""
    parameters = inspect.signature(hf_model.forward).parameters
    return {"logits_to_keep": count} if "logits_to_keep" in parameters else {}


def _cut_out(
    states: Sequence[tuple[Tensor, Tensor]], row: int, request: EncodeRequest, fingerprint: str
) -> BlockKV:
    """One row's real tokens, copied: a view would keep the whole batch alive in the store."""
    own = slice(len(request.sink_ids), request.num_tokens)
    return BlockKV(
        keys=tuple(keys[row, :, own].clone() for keys, _ in states),
        values=tuple(values[row, :, own].clone() for _, values in states),
        token_ids=torch.tensor(request.token_ids, dtype=torch.long),
        fingerprint=fingerprint,
        digest=request.digest,
        handle=request.handle,
    )
