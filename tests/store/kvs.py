"""Small, deterministic KV blocks of any shape and dtype for the store tests."""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from blockattn_rag.errors import StoreError
from blockattn_rag.kv.block_kv import BlockKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from blockattn_rag.store import KVStore

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = (*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bytes interpreted as ``dtype``, with zeros in place of non-finite values."""
    width = dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * width), generator=generator)
    numbers = raw.to(torch.uint8).view(dtype)
    numbers.view(_BITS[width])[~torch.isfinite(numbers.double())] = 0
    return numbers


def make_kv(
    name: str = "a passage",
    *,
    layers: int = 2,
    heads: int = 2,
    tokens: int = 3,
    head_dim: int = 4,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    fingerprint: str = "f" * 64,
    more_heads: int = 0,
    namespace: str = "",
    quantized: bool = False,
) -> BlockKV:
    """Return KV derived from ``name``. ``more_heads``: Additional heads of the last layer."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little")
    shapes = [(heads + (more_heads if i == layers - 1 else 0), tokens) for i in range(layers)]
    digest = hashlib.sha256(name.encode()).hexdigest()
    kv = BlockKV(
        keys=tuple(random_tensor((*s, head_dim), dtype, seed + i) for i, s in enumerate(shapes)),
        values=tuple(
            random_tensor((*s, value_dim or head_dim), dtype, seed + 100 + i)
            for i, s in enumerate(shapes)
        ),
        token_ids=torch.arange(seed, seed + tokens),
        fingerprint=fingerprint,
        digest=digest,
        handle=digest[:32],
        namespace=namespace,
    )
    return kv.quantized() if quantized else kv


def same(a: object, b: BlockKV) -> bool:
    """Whether ``a`` is a block that equals ``b`` bit for bit, including NaNs."""
    if not isinstance(a, BlockKV):
        return False
    tensors_a, tensors_b = (
        [t for layer in range(kv.num_layers) for t in kv.tensors(layer)] + [kv.token_ids]
        for kv in (a, b)
    )
    names = [
        (kv.fingerprint, kv.digest, kv.handle, kv.namespace, kv.scales and kv.scales.dtype)
        for kv in (a, b)
    ]
    return (
        names[0] == names[1]
        and (a.num_layers, len(a.values)) == (b.num_layers, len(b.values))
        and all(
            x.dtype == y.dtype
            and x.shape == y.shape
            and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
            for x, y in zip(tensors_a, tensors_b, strict=True)
        )
    )


def call_at_random(store: KVStore, blocks: Sequence[BlockKV], seed: int) -> None:
    """Call methods of a store in random order, and check the blocks that it returns."""
    choose = random.Random(seed)
    for _ in range(15):
        kv = choose.choice(blocks)
        match choose.choice(["put", "get", "get many", "delete", "touch", "keys"]):
            case "put":
                store.put(kv.key, kv)
            case "get":
                found = store.get(kv.key)
                assert found is None or same(found, kv)
            case "get many":
                for kv, entry in zip(
                    blocks, store.get_many([kv.key for kv in blocks]), strict=True
                ):
                    assert not isinstance(entry, StoreError)
                    assert entry is None or same(entry, kv)
            case "delete":
                store.delete(kv.key)
            case "touch":
                store.touch(kv.key)
            case "keys":
                assert set(store.keys()) <= {kv.key for kv in blocks}


def kvs(dtypes: Sequence[torch.dtype] = DTYPES) -> st.SearchStrategy[BlockKV]:
    sizes = st.integers(1, 4)
    return st.builds(
        make_kv,
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        layers=sizes,
        heads=sizes,
        tokens=st.integers(1, 9),
        head_dim=st.integers(1, 5),
        value_dim=st.integers(1, 5),
        dtype=st.sampled_from(dtypes),
        fingerprint=st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        more_heads=st.integers(0, 2),
        namespace=st.sampled_from(["", "tenant-1", "tenant-1/private"]),
    )


def quantized_kvs() -> st.SearchStrategy[BlockKV]:
    return kvs(FLOATS[:3]).map(lambda kv: kv.quantized())
