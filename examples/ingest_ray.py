"""Encode a large collection of passages with Ray Data, on several servers or with several engines.

    python examples/ingest_ray.py passages.jsonl handles --journal journal \
        --server http://gpu-1:8000 --server http://gpu-2:8000
    python examples/ingest_ray.py passages.jsonl handles --model ./llama-8b-block \
        --store s3://bucket/kv --workers 4

Each line of `passages.jsonl` is a JSON object with the field `text`. The same objects are written
to the folder `handles` with an additional field `kv_handle`, for the metadata of a vector store.

With --server, each worker sends texts to all servers. A second run skips passages in the journal, a
folder that all workers must be able to write to. With --model, each worker loads the model (on a
separate GPU with --gpus 1), and writes to the store. Ray restarts crashed workers and retries their
batches. To run the script, also `pip install "ray[data]"`.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import ray

from blockattn_rag import BlockAttentionEngine, handle_of
from blockattn_rag.prompts import CHAT, Block
from blockattn_rag.server import ServerClient, ServerPool

BATCH = 256
"""Number of passages that a worker encodes in one call."""


class Encoder:
    """Actor that encodes batches of passages."""

    def __init__(self, options: argparse.Namespace) -> None:
        if options.server:
            clients = [ServerClient(url) for url in options.server]
            self._encode = ServerPool(clients, options.journal).encode
        else:
            engine = BlockAttentionEngine.from_pretrained(options.model, store=options.store)
            self._encode = lambda texts: engine.encode([Block(t, CHAT.template) for t in texts])

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        texts = [text.strip() for text in batch["text"]]
        self._encode([text for text in texts if text])
        return {**batch, "kv_handle": [handle_of(text) if text else "" for text in texts]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("passages", help="JSON Lines file with the field `text`")
    parser.add_argument("handles", help="Output folder")
    parser.add_argument("--server", action="append", help="URL of a server; repeatable")
    parser.add_argument(
        "--journal", type=os.path.abspath, help="Folder that records stored passages"
    )
    parser.add_argument("--model", help="Model that each worker loads, instead of --server")
    parser.add_argument("--store", help="Store for --model, such as s3://bucket/kv")
    parser.add_argument("--workers", type=int, help="Workers. Default: one per server, or 1")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs per worker with --model")
    options = parser.parse_args()
    if (options.server is None) == (options.model is None or options.store is None):
        parser.error("Expected --server, or --model and --store")
    dataset = ray.data.read_json(options.passages)
    encoded = dataset.map_batches(
        Encoder,
        fn_constructor_args=(options,),
        batch_size=BATCH,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=options.workers or len(options.server or [1])),
        num_cpus=0.1 if options.server else 1,  # Workers mostly wait for servers.
        num_gpus=options.gpus or None,
    )
    encoded.write_json(options.handles)


if __name__ == "__main__":
    main()
