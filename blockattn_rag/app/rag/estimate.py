"""What an ingestion is about to compute and store, estimated before it starts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockattn_rag.app.rag.database import Database
from blockattn_rag.prompts.blocks import Block


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is to be encoded.

    Args:
        passages: Passages of the documents.
        blocks: Their distinct texts, which are encoded once each.
        new_blocks: Blocks that are not stored yet.
        new_tokens: Tokens of these.
        new_bytes: Bytes that their keys and values take, in what the database keeps them in.
        int8_bytes: Bytes that they would take in int8.
        seconds: Time that encoding takes; None if the model has no gated feed-forward layers.
        folder: Folder of the store; None for other stores.
        free_bytes: Free space there.
    """

    passages: int
    blocks: int
    new_blocks: int
    new_tokens: int
    new_bytes: int
    int8_bytes: int
    seconds: float | None
    folder: Path | None
    free_bytes: int | None


def estimate(database: Database, blocks: Sequence[Block]) -> Estimate | None:
    """Estimate the encoding of blocks; None if a server has the model.

    In other stores than folders, blocks count as new: looking each up takes a request.
    """
    from blockattn_rag.engine.engine import BlockAttentionEngine
    from blockattn_rag.lab.efficiency.shapes import prefill_flops
    from blockattn_rag.lab.planning import footprint, measured_operations_per_s
    from blockattn_rag.store import DirectoryStore

    engine = database.engine
    if not isinstance(engine, BlockAttentionEngine):
        return None

    model, store = engine.model, engine.store
    distinct = [*{block.handle: block for block in blocks}.values()]
    folder = store.path if isinstance(store, DirectoryStore) else None
    new = [one for one in distinct if folder is None or not engine.contains(one)]
    sizes = [len(model.tokenizer.block_ids(one, first=False)) for one in new]
    config = model.config.get_text_config(decoder=True)
    taken = {
        kind: sum(map(footprint(config, model.dtype, kind).block_bytes, sizes)) if sizes else 0
        for kind in ("model", "int8")
    }
    seconds = None
    if not sizes:
        seconds = 0.0
    elif hasattr(config, "intermediate_size"):
        speed = measured_operations_per_s(model.dtype, model.device.type)
        seconds = sum(prefill_flops(config, size) for size in sizes) / speed
    return Estimate(
        passages=len(blocks),
        blocks=len(distinct),
        new_blocks=len(new),
        new_tokens=sum(sizes),
        new_bytes=taken[engine.kv_dtype],
        int8_bytes=taken["int8"],
        seconds=seconds,
        folder=folder,
        free_bytes=None if folder is None else shutil.disk_usage(_existing(folder)).free,
    )


def check_room(found: Estimate) -> None:
    """Refuse an ingestion that its disk has no room for.

    Raises:
        ValueError: The estimate is more than what is free.
    """
    if found.free_bytes is not None and found.new_bytes > found.free_bytes:
        int8 = ""
        if found.int8_bytes < found.new_bytes:
            int8 = f" (int8 takes {_gib(found.int8_bytes)}: --kv-dtype int8)"
        raise ValueError(
            f"{found.folder} has {_gib(found.free_bytes)} free, and the keys and values of "
            f"{found.new_blocks:,} passages take about {_gib(found.new_bytes)}{int8}; free some "
            "space, or ingest less or elsewhere"
        )


def _gib(number: int) -> str:
    return f"{number / (1 << 30):.2f} GiB"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(one for one in (folder, *folder.absolute().parents) if one.exists())
