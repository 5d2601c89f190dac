"""Relay attention over any number of stored blocks in one kernel launch.

Each program reads some chunks of blocks in place, for one key-value head and some query rows. It
rotates its queries once per chunk, by minus the block's shift, and maintains one online softmax. A
second kernel merges the programs' results by their log-sum-exp (RelayAttention, equations 4-6).
Everything that differs between requests is read from tensors, so one CUDA graph supports all
contexts that fit in the tables.

Shapes: ``H`` query heads, ``K`` key-value heads, ``T`` tokens, ``D`` head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _KEYS = 64, 64
_WARPS, _STAGES = 4, 3
_LOG2_E = 1.4426950408889634


def attend_blocks(
    query: Tensor,
    pointers: Tensor,
    block_tokens: Tensor,
    angles: Tensor,
    chunks: Tensor,
    counts: Tensor,
    scale: float,
    *,
    kv_heads: int,
    rotary_dim: int,
    interleaved: bool,
    chunk_tokens: int,
    programs: int,
) -> Tensor:
    """Compute attention of new tokens to stored blocks, to the tail, and causally to each other.

    Args:
        query: Queries ``[H, T, D]``, 16-bit, rotated to their positions. Rows must be contiguous.
        pointers: Memory addresses of each block's keys and values, int64 ``[2, blocks]``. Each
            tensor is ``[K, tokens, D]``, contiguous and in the query's dtype. Block 0 is the tail.
        block_tokens: Number of tokens in each block's tensors, int32 ``[blocks]``.
        angles: cos and sin that rotate queries back by each block's shift, float32
            ``[2, blocks, rotary_dim]``.
        chunks: Block, first token and number of tokens (at most ``chunk_tokens``) of each context
            chunk, int32 ``[chunks, 3]``.
        counts: Number of chunks, and number of tail tokens before the new tokens, int32 ``[2]``.
            The tail already contains the new tokens' keys and values.
        scale: Factor that scores are multiplied by before the softmax (base e).
        kv_heads: Number of key-value heads, ``K``.
        rotary_dim, interleaved: See ``RotaryLayout``.
        programs: Number of kernel programs that fully occupy the device.

    Returns:
        Attention output ``[T, H, D]``, in the query's dtype.
    """
    heads, tokens, size = query.shape
    rows = heads // kv_heads * tokens
    tiles = triton.cdiv(rows, _ROWS)
    splits = max(1, min(64, programs // (tiles * kv_heads)))
    columns = triton.next_power_of_2(size)
    wide = torch.float32
    output = torch.empty(splits, heads, tokens, size, dtype=wide, device=query.device)
    lse = torch.empty(splits, heads, tokens, dtype=wide, device=query.device)
    _attend_chunks[(splits, kv_heads, tiles)](
        query, pointers, block_tokens, angles, chunks, counts, output, lse,
        scale * _LOG2_E, query.stride(0), query.stride(1), tokens, pointers.shape[1],
        chunks.shape[0],
        heads // kv_heads, splits, size, columns, rotary_dim, interleaved,
        chunk_tokens, max(16, min(_ROWS, triton.next_power_of_2(rows))), _KEYS,
        num_warps=_WARPS, num_stages=_STAGES,
    )  # fmt: skip
    merged = torch.empty(tokens, heads, size, dtype=query.dtype, device=query.device)
    _merge_splits[(tokens, heads)](
        output, lse, merged, tokens, heads, splits, triton.next_power_of_2(splits), size, columns
    )
    return merged


# Compiled once for all lengths. Without annotations, because Triton only accepts its own types.
@triton.jit(do_not_specialize=["tokens", "num_blocks", "most_chunks"])  # type: ignore[untyped-decorator]
def _attend_chunks(  # type: ignore[no-untyped-def]
    query, pointers, block_tokens, angles, chunks, counts, output, lse,
    scale, head_stride, token_stride, tokens, num_blocks, most_chunks,
    group: tl.constexpr, splits: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
    rotary: tl.constexpr, interleaved: tl.constexpr, chunk_tokens: tl.constexpr,
    tile_rows: tl.constexpr, tile_keys: tl.constexpr,
):  # fmt: skip
    split, kv_head = tl.program_id(0), tl.program_id(1)
    row = tl.program_id(2) * tile_rows + tl.arange(0, tile_rows)
    head, token = kv_head * group + row // tokens, row % tokens
    is_row = row < group * tokens
    column = tl.arange(0, columns)
    rotates = column < rotary
    partner = column ^ 1 if interleaved else (column + rotary // 2) % rotary
    partner = tl.where(rotates, partner, column)
    is_state = is_row[:, None] & (column < size)[None, :]
    base = query + (head.to(tl.int64) * head_stride + token * token_stride)[:, None]
    state = tl.load(base + column[None, :], is_state, 0.0).to(tl.float32)
    other = tl.load(base + partner[None, :], is_state, 0.0).to(tl.float32)

    kind = query.dtype.element_ty
    num_chunks, before = tl.load(counts), tl.load(counts + 1)
    tail_tokens = before + tokens
    highest = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    weighted = tl.zeros([tile_rows, columns], tl.float32)
    end = num_chunks + (tail_tokens + chunk_tokens - 1) // chunk_tokens
    for chunk in range(split, end, splits):
        is_tail = chunk >= num_chunks
        entry = chunks + 3 * tl.minimum(chunk, most_chunks - 1)
        block = tl.where(is_tail, 0, tl.load(entry)).to(tl.int64)
        tail_start = (chunk - num_chunks) * chunk_tokens
        start = tl.where(is_tail, tail_start, tl.load(entry + 1))
        left = tl.minimum(tail_tokens - tail_start, chunk_tokens)
        length = tl.where(is_tail, left, tl.load(entry + 2))
        # Index of the last visible key of each row.
        last = tl.where(is_tail, before + token - start, length - 1)
        keys = tl.load(pointers + block).to(tl.pointer_type(kind))
        values = tl.load(pointers + num_blocks + block).to(tl.pointer_type(kind))
        keys, values = tl.multiple_of(keys, 16), tl.multiple_of(values, 16)
        first = (kv_head * tl.load(block_tokens + block).to(tl.int64) + start) * size
        angle = block * rotary + column
        cos = tl.load(angles + angle, rotates, 1.0)
        sin = tl.load(angles + num_blocks * rotary + angle, rotates, 0.0)
        rotated = (state * cos[None, :] + other * sin[None, :]).to(kind)
        for at in range(0, length, tile_keys):
            key = at + tl.arange(0, tile_keys)
            place = first + key * size
            is_key = (key < length)[:, None] & (column < size)[None, :]
            tile = tl.load(keys + place[:, None] + column[None, :], is_key, 0.0)
            scores = tl.dot(rotated, tile.trans()) * scale
            seen = (key < length)[None, :] & (key[None, :] <= last[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            peak = tl.maximum(highest, tl.max(scores, 1))
            zero = tl.where(peak == float("-inf"), 0.0, peak)
            weights = tl.exp2(scores - zero[:, None])
            kept = tl.exp2(highest - zero)
            total = total * kept + tl.sum(weights, 1)
            tile = tl.load(values + place[:, None] + column[None, :], is_key, 0.0)
            weighted = weighted * kept[:, None] + tl.dot(weights.to(kind), tile)
            highest = peak
    some = tl.where(total > 0, total, 1.0)
    place = (split * group * tl.num_programs(1) + head).to(tl.int64) * tokens + token
    tl.store(output + place[:, None] * size + column[None, :], weighted / some[:, None], is_state)
    tl.store(lse + place, highest + tl.log2(some), is_row)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _merge_splits(  # type: ignore[no-untyped-def]
    output, lse, merged, tokens, heads,
    splits: tl.constexpr, split_rows: tl.constexpr, size: tl.constexpr, columns: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    split, column = tl.arange(0, split_rows), tl.arange(0, columns)
    place = (split * heads + head).to(tl.int64) * tokens + token
    part = tl.load(lse + place, split < splits, float("-inf"))
    weight = tl.exp2(part - tl.max(part, 0))
    is_state = (split < splits)[:, None] & (column < size)[None, :]
    states = tl.load(output + place[:, None] * size + column[None, :], is_state, 0.0)
    mean = tl.sum(states * weight[:, None], 0) / tl.sum(weight, 0)
    row = merged + (token * heads + head) * size
    tl.store(row + column, mean.to(merged.dtype.element_ty), column < size)
