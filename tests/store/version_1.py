"""Stores of format version 1, as earlier versions of this package wrote them."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch
import xxhash

from blockattn_rag.kv.block_kv import BlockKV, token_digest
from blockattn_rag.store.checks import DTYPE_NAMES
from blockattn_rag.store.migration import migrate
from tests.store.kvs import make_kv

MARK = '{"format": "blockattn_rag.kv", "version": 1}\n'


def encode(kv: BlockKV) -> bytes:
    """The file of version 1; ``kv.digest`` stands for that of the text."""
    tensors = {"token_ids": kv.token_ids}
    for name, layers in (("keys", kv.keys), ("values", kv.values)):
        if len({layer.shape for layer in layers}) == 1:
            tensors[name] = torch.stack(layers)
        else:
            tensors |= {f"{name}.{i}": layer for i, layer in enumerate(layers)}
    fields: dict[str, object] = {
        "__metadata__": {
            "format": "blockattn_rag.kv",
            "version": "1",
            "xxh3_128": "0" * 32,
            "fingerprint": kv.fingerprint,
            "digest": kv.digest,
            "handle": kv.handle,
        }
    }
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        place = [len(data), len(data) + len(raw)]
        shape = list(tensor.shape)
        fields[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": place}
        data += raw
    head = json.dumps(fields, separators=(",", ":")).encode()
    head += b" " * (-(8 + len(head) + kv.token_ids.nbytes) % 64)
    content = bytearray(len(head).to_bytes(8, "little") + head + data)
    assert content[79:111] == b"0" * 32
    content[79:111] = xxhash.xxh3_128_hexdigest(bytes(content)).encode()
    return bytes(content)


def put(folder: Path, kv: BlockKV) -> Path:
    """Write an entry into a store of version 1, which is made if there is none."""
    key = hashlib.sha256(f"{kv.fingerprint}:{kv.digest}".encode()).hexdigest()
    path = folder / "objects" / key[:2] / f"{key}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(kv))
    (folder / "format.json").write_text(MARK)
    return path


def migrated(kv: BlockKV) -> BlockKV:
    """What becomes of an entry."""
    return replace(kv, digest=token_digest(kv.token_ids.tolist()))


def passage(number: int) -> BlockKV:
    return make_kv(f"passage {number}", layers=6, tokens=20, head_dim=32)


def kill_migrations(folder: Path, times: int) -> int:
    """Fork a migration and kill it at a random moment, ``times`` times unless it ends before.
    Returns how many were killed."""
    torch.set_num_threads(1)
    choose = random.Random(0)
    for killed in range(times):
        begun, beginning = os.pipe()
        worker = os.fork()
        if worker == 0:
            try:
                os.write(beginning, b"!")
                migrate(folder, all_plain=True)
            finally:
                os._exit(0)  # an error here must not run the parent's code
        os.close(beginning)
        assert os.read(begun, 1) == b"!"
        os.close(begun)
        time.sleep(choose.uniform(0.001, 0.02))
        os.kill(worker, signal.SIGKILL)
        _, status = os.waitpid(worker, 0)
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return killed
    return times


def kill(folder: Path, times: int) -> None:
    """``kill_migrations``, of which not one may come to its end."""
    assert kill_migrations(folder, times) == times
    assert json.loads((folder / "format.json").read_text())["version"] == 1


def die_at(folder: Path, step: str) -> None:
    """Migrate and die, as by ``kill -9``, at the first call of this function of ``os``."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(os, step, die)
    migrate(folder, all_plain=True)
