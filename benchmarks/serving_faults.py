"""Inject faults into a block-mode server and its store while many clients send requests.

    python benchmarks/serving_faults.py --requests 10000

vLLM serves the bundled model from an S3 store (moto) through a proxy that injects faults. In
successive phases, the store is slow, corrupts data, loses entries, damages entries and is down, and
the server is killed and restarted. Clients send passages as documents or as content parts; some use
full mode, and some disconnect early. The exit status is 1 if an answer differs from that of this
package's engine, a client waits longer than the timeout, an error gives no reason, or pages or
requests leak.

Run the script in the environment of `make test-vllm`, with `moto[server]` installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import typer
from openai_client import FailedAnswerError, Question, ask
from serving_load import ENVIRONMENT, host, write
from tables import markdown

from blockattn_rag import Passage
from blockattn_rag.store import ObjectStore
from blockattn_rag.store.objects import entry_path
from tests.store.faults import Fault, FaultyServer, faulty
from tests.store.servers import BUCKET, S3_ENVIRONMENT, s3_server
from tests_vllm.reference import Reference
from tests_vllm.server import Server

TOKENS = 8
LEAST_MARGIN = 0.01
"""Minimum margin of the top token's logit, so that rounding cannot change the answer."""

UNNAMED = ("", "Internal Server Error", "Internal server error")
"""Error messages that give no reason."""

Breaker = Callable[["Site"], Coroutine[Any, Any, None]]


WAYS = ("documents", "parts", "full")
"""Methods of sending a question. ``full``: as documents, answered in full mode."""


@dataclass(frozen=True, slots=True)
class Known:
    """A question, and the correct answer tokens for each method of sending it."""

    question: Question
    right: Mapping[str, list[int]]

    def body(self, way: str) -> dict[str, Any]:
        """Return the body of the chat request."""
        if way == "full":
            return {**self.question.documents, "blockattn": {"mode": "full"}}
        return self.question.parts if way == "parts" else self.question.documents


@dataclass(slots=True)
class Site:
    """The components that faults are injected into: proxy, store and server.

    Args:
        proxy: Proxy between server and store.
        direct: Client of the store that bypasses the proxy.
        upstream: Address of the store.
        start: Function that starts a server.
    """

    proxy: FaultyServer
    direct: ObjectStore
    upstream: str
    start: Callable[[], Server]
    server: Server = field(init=False)
    is_up: asyncio.Event = field(default_factory=asyncio.Event)
    kills: int = 0
    booting: asyncio.Task[None] | None = None
    choose: random.Random = field(default_factory=lambda: random.Random(0))

    async def reboot(self) -> None:
        """Kill the server's processes, and start a new server."""
        self.is_up.clear()
        self.kills += 1
        self.server.kill()
        await self.boot()

    async def boot(self) -> None:
        """Start a server."""
        self.server = await asyncio.to_thread(lambda: self.start().wait())
        self.is_up.set()

    def some_key(self) -> str | None:
        return self.choose.choice(keys) if (keys := [*self.direct.keys()]) else None


async def nothing(site: Site) -> None:
    """Inject no faults beyond those of the proxy."""


async def delete_entries(site: Site) -> None:
    """Delete entries from the store, one after another."""
    while True:
        if key := await asyncio.to_thread(site.some_key):
            await asyncio.to_thread(site.direct.delete, key)
        await asyncio.sleep(0.2)


async def damage_entries(site: Site) -> None:
    """Flip a bit in stored entries, one after another."""
    async with httpx.AsyncClient(base_url=site.upstream, trust_env=False) as raw:
        while True:
            if key := await asyncio.to_thread(site.some_key):
                path = f"/{BUCKET}/kv/{entry_path(key)}"
                found = await raw.get(path)
                if found.is_success:
                    content = bytearray(found.content)
                    content[site.choose.randrange(len(content))] ^= 1
                    (await raw.put(path, content=bytes(content))).raise_for_status()
            await asyncio.sleep(0.2)


async def stop_store(site: Site) -> None:
    """Stop the store for two seconds out of every four."""
    while True:
        site.proxy.faults = {"503": 1.0}
        await asyncio.sleep(2)
        site.proxy.faults = {}
        await asyncio.sleep(2)


async def kill_server(site: Site) -> None:
    """Kill the server and its engine, and start a new server."""
    while True:
        await asyncio.sleep(site.choose.uniform(4, 8))
        site.booting = asyncio.create_task(site.reboot())
        await asyncio.shield(site.booting)  # Finish starting the server even if the phase ends.


PHASES: Mapping[str, tuple[float, Mapping[Fault, float], Breaker]] = {
    "nothing": (0.1, {}, nothing),
    "slow": (0.2, {"slow": 0.3}, nothing),
    "corrupts": (
        0.15,
        {"truncated": 0.05, "other bytes": 0.05, "other range": 0.05, "flipped bit": 0.05},
        nothing,
    ),
    "loses entries": (0.15, {}, delete_entries),
    "damages entries": (0.15, {}, damage_entries),
    "is down": (0.15, {}, stop_store),
    "hangs": (0.05, {"hangs": 0.002, "hangs within": 0.002}, nothing),
    "server killed": (0.05, {"503": 0.02, "flipped bit": 0.02, "slow": 0.02}, kill_server),
}
"""For each phase: its share of the requests, the faults of the proxy, and a function that injects
additional faults."""


def known_cases(reference: Reference, most: int) -> list[Known]:
    """Return questions whose answers do not depend on rounding, with their correct tokens."""
    found = []
    tokenizer = reference.model.tokenizer.tokenizer
    for number in range(most):
        _, *passages, text = reference.case(number).texts
        question = Question(text, tuple(Passage("", one) for one in passages[:3]))
        right = {}
        for way in WAYS:
            is_parts, mode = way == "parts", "full" if way == "full" else "block"
            prompt = (question.parts_prompt if is_parts else question.documents_prompt)(tokenizer)
            given = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "temperature": 0.0}
            right[way] = reference.engine.generate(prompt, mode=mode, **given).token_ids
            logits = reference.engine.answer_logits(prompt, right[way], mode=mode)
            best = logits.topk(2).values
            if (best[:, 0] - best[:, 1]).min() < LEAST_MARGIN:
                break
        else:
            found.append(Known(question, right))
    return found


class Campaign:
    """Sends requests from many clients, and records their outcomes.

    Args:
        site: Server and store.
        known: Questions with their correct answers.
        deadline_s: Timeout in seconds, after which a request counts as stuck.
    """

    def __init__(self, site: Site, known: Sequence[Known], deadline_s: float) -> None:
        self._site = site
        self._known = known
        self._deadline_s = deadline_s
        self.outcomes: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.longest_s = 0.0

    async def phase(self, requests: int, clients: int, http: httpx.AsyncClient) -> None:
        """Send requests from concurrent clients, and record their outcomes."""
        waiting = iter(range(requests))

        async def client(number: int) -> None:
            choose = random.Random(number)
            for _ in waiting:
                await self._site.is_up.wait()
                began = time.monotonic()
                try:
                    async with asyncio.timeout(self._deadline_s):
                        outcome = await self._outcome(http, choose)
                except TimeoutError:
                    outcome = "stuck"
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                self.outcomes[outcome] += 1

        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(client(number))

    async def _outcome(self, http: httpx.AsyncClient, choose: random.Random) -> str:
        one = choose.choice(self._known)
        (way,) = choose.choices(WAYS, (5, 4, 1))
        leaves = choose.randint(1, TOKENS - 1) if choose.random() < 0.1 else None
        return await self._outcome_of(http, one, way, leaves)

    async def _outcome_of(
        self, http: httpx.AsyncClient, one: Known, way: str, leaves: int | None = None
    ) -> str:
        """Send a request, and return its outcome. ``leaves``: Tokens until the client leaves."""
        kills, server = self._site.kills, self._site.server
        body = {"max_tokens": TOKENS, "min_tokens": TOKENS, **one.body(way)}
        try:
            tokens = (await ask(http, server, body, leave_after=leaves)).tokens
        except FailedAnswerError as error:
            self.reasons[without_names(str(error))] += 1
            return "failed"
        except httpx.TransportError:
            return "broken off" if kills == self._site.kills else "server killed"
        if tokens != one.right[way][: len(tokens)] or (leaves is None and len(tokens) < TOKENS):
            return "wrong"
        return "right" if leaves is None else "left early"

    async def left_behind(self, http: httpx.AsyncClient) -> dict[str, float]:
        """Return the requests and pages that remain half a minute after the last request, and the
        number of wrong answers without faults."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        until = time.monotonic() + 30
        while True:
            held = {name: self._site.server.counted(name) for name in names}
            held["vllm:kv_cache_usage_perc"] = self._site.server.counted("vllm:kv_cache_usage_perc")
            if not any(held.values()) or time.monotonic() > until:
                break
            await asyncio.sleep(0.5)
        # After failures, workers skip a store for half a second. Wait until they use it again.
        await asyncio.sleep(2)
        after = Counter(
            [await self._outcome_of(http, one, way) for one in self._known for way in WAYS]
        )
        return held | {"not right afterwards": sum(after.values()) - after["right"]}


def without_names(reason: str) -> str:
    """Remove numbers and ids from a reason, so that similar reasons are counted together."""
    return re.sub(r"(?<=/)[0-9a-f]{2}(?=/)|[0-9a-f]{16,}(-again)?|\d+(\.\d+)?", "#", reason)[:200]


async def campaign(
    site: Site,
    known: Sequence[Known],
    phases: Sequence[str],
    requests: int,
    clients: int,
    deadline_s: float,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Run phases one after another, and call ``done`` with the results of each."""
    await site.boot()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=None, trust_env=False, limits=limits) as http:
        for name in phases:
            share, faults, breaker = PHASES[name]
            began, now = time.monotonic(), Campaign(site, known, deadline_s)
            site.proxy.faults, site.proxy.made = dict(faults), Counter()
            breaking = asyncio.create_task(breaker(site))
            await now.phase(round(share * requests), clients, http)
            breaking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await breaking
            await site.is_up.wait()
            site.proxy.faults = {}
            row = {
                "phase": name,
                "requests": round(share * requests),
                "outcomes": now.outcomes,
                "reasons": now.reasons,
                "longest_s": now.longest_s,
                "faults": dict(site.proxy.made),
                "kills": site.kills,
                "left": await now.left_behind(http),
                "seconds": time.monotonic() - began,
            }
            print(summary(row), flush=True)
            done(row)


def summary(row: Mapping[str, Any]) -> str:
    """Format the results of a phase as text."""
    outcomes = ", ".join(f"{number} {name}" for name, number in row["outcomes"].most_common())
    lines = [
        f"{row['phase']}: {row['requests']} requests in {row['seconds']:.0f} s: {outcomes}; "
        f"longest {row['longest_s']:.1f} s; left {row['left']}; proxy {row['faults']}, "
        f"server killed {row['kills']} times",
        *(f"    {number} x {reason}" for reason, number in row["reasons"].most_common()),
    ]
    return "\n".join(lines)


def sums_of(rows: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Return the total of each outcome over all phases."""
    return sum((row["outcomes"] for row in rows), Counter[str]())


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format the results as a Markdown table."""
    names = ("right", "left early", "failed", "server killed", "wrong", "stuck", "broken off")
    head = ("phase", "requests", *names, "longest", "pages left")
    return markdown(
        head,
        (
            (
                *(row["phase"], row["requests"], *(row["outcomes"][name] for name in names)),
                *(f"{row['longest_s']:.0f} s", f"{row['left']['vllm:kv_cache_usage_perc']:.0%}"),
            )
            for row in rows
        ),
    )


def is_bad(row: Mapping[str, Any]) -> bool:
    """Return whether a phase has wrong, stuck or unexplained answers, or leaks."""
    bad = sum(row["outcomes"][name] for name in ("wrong", "stuck", "broken off"))
    unnamed = [one for one in row["reasons"] if one.rpartition(": ")[2].strip() in UNNAMED]
    return bool(bad or unnamed or any(row["left"].values()))


def main(
    requests: int = 10_000,
    clients: int = 16,
    cases: int = 24,
    deadline_s: float = 120.0,
    phases: Annotated[str, typer.Option(help="Phases to run, comma-separated.")] = ",".join(PHASES),
    output: Annotated[Path | None, typer.Option()] = None,
) -> None:
    os.environ |= S3_ENVIRONMENT
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        reference = Reference(folder)
        known = known_cases(reference, cases)
        upstream = stack.enter_context(s3_server())
        proxy = stack.enter_context(faulty(upstream, {}))
        os.environ["AWS_ENDPOINT_URL"] = upstream
        direct = ObjectStore(f"s3://{BUCKET}/kv")
        options = reference.options(store=direct.url, memory="1MiB", load_deadline_s=5)

        def start() -> Server:
            return Server(
                options,
                folder / "server.log",
                *("--num-gpu-blocks-override", "64", "--disable-uvicorn-access-log"),
                environment=ENVIRONMENT | {"AWS_ENDPOINT_URL": proxy.url},
            )

        site = Site(proxy, direct, upstream, start)
        stack.callback(lambda: site.server.close())
        rows: list[dict[str, Any]] = []
        given = {"prompts": len(known), "clients": clients, "deadline_s": deadline_s}

        def done(row: dict[str, Any]) -> None:
            rows.append(row)
            write(output, {"machine": host(), **given, "phases": rows}, table(rows))

        names = phases.split(",")
        asyncio.run(campaign(site, known, names, requests, clients, deadline_s, done))
    print(f"{sum(row['requests'] for row in rows)} requests: {dict(sums_of(rows))}")
    sys.exit(any(is_bad(row) for row in rows))


if __name__ == "__main__":
    typer.run(main)
