"""Ingestion on one or more servers that share a store, with a journal of stored passages."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blockattn_rag.engine.ingest import EncodeStats, progress
from blockattn_rag.errors import ServingError
from blockattn_rag.prompts.blocks import handle_of
from blockattn_rag.server.protocol import EncodeAnswer, EncodeBody, ServerInfo

logger = logging.getLogger("blockattn_rag")

_AT_ONCE = 8  # Concurrent requests per server, which batches their passages.
_BATCH_PASSAGES, _BATCH_CHARACTERS = 32, 1 << 15
_CHECK_AGAIN_S = 5.0  # Interval between health checks of a failed server.
_BEING_CHECKED = float("inf")  # Time of the next check while a check is running.
_EXCERPT = 60  # Characters of a passage in the journal.


class Server(Protocol):
    """Methods of ``ServerClient`` that ingestion requires. A protocol avoids an import cycle."""

    url: str

    @property
    def info(self) -> ServerInfo: ...

    def check(self) -> ServerInfo: ...

    def send(self, body: EncodeBody) -> EncodeAnswer: ...

    def is_stored(self, text: str) -> bool: ...


S = TypeVar("S", bound=Server)


class ServerPool:
    """Encodes passages on servers with the same model and store.

    Each server receives new requests as it completes earlier ones. If a server fails temporarily,
    its requests go to other servers. A failed server is checked every few seconds, and used again
    once it is healthy.

    Args:
        servers: Clients of the servers (``ServerClient``).
        journal: Folder that records which passages are stored. Recorded passages are skipped
            without a request; delete the folder to look them up again. Several processes may share
            it. Default: no journal.

    Raises:
        ValueError: ``servers`` is empty.
    """

    def __init__(self, servers: Sequence[Server], journal: str | Path | None = None) -> None:
        if not servers:
            raise ValueError("Expected at least one server, found none")
        is_checked = len(servers) == 1  # With a single server, the first request reports its error.
        self._members = [_Member(server, None if is_checked else 0.0) for server in servers]
        self._folder = None if journal is None else Path(journal)
        self._stored_text: str | None = None

    @cached_property
    def info(self) -> ServerInfo:
        """Information from the first server that responds. Raises ServingError if none does."""
        return first_reachable([member.server for member in self._members]).info

    @cached_property
    def _journal(self) -> Journal | None:
        return None if self._folder is None else Journal(self._folder, _identity(self.info))

    def encode(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> EncodeStats:
        """Encode passages into the servers' store, with concurrent requests.

        When a request completes, its passages are stored, so an interrupted run continues where it
        stopped.

        Args:
            texts: Texts of the passages. Equal texts are sent once.
            show_progress: Whether to show a progress bar.
            on_progress: Called with the numbers of completed and total characters.

        Returns:
            Statistics. Passages in the journal count as reused.

        Raises:
            MissError: Passages are missing, and a server is read-only.
            ServingError: A server rejected a request, a request failed on every server, or no
                server is healthy. No further requests are sent.
            ValueError: The servers differ in model, recipe, namespace or store, or a text is empty.
        """
        started, journal = time.perf_counter(), self._journal
        distinct = [*dict.fromkeys(text.strip() for text in texts)]
        new = [text for text in distinct if journal is None or handle_of(text) not in journal.done]
        stats = EncodeStats(reused=len(distinct) - len(new))
        total, left = (sum(map(len, group)) for group in (distinct, new))
        with (
            progress(total, total - left, show_progress, on_progress, unit="characters") as report,
            closing(self._answers(_bodies(new))) as answers,
        ):
            for url, body, answer in answers:
                if journal is not None:
                    journal.add(url, body, answer)
                stats = replace(
                    stats,
                    computed=stats.computed + answer.passages.count("encoded"),
                    reused=stats.reused + answer.passages.count("found"),
                    computed_tokens=stats.computed_tokens + answer.encoded_tokens,
                    stored_bytes=stats.stored_bytes + answer.stored_bytes,
                )
                report(sum(map(len, body.texts)))
        return replace(stats, seconds=time.perf_counter() - started)

    def remove_journal(self) -> None:
        """Delete the journal, so that passages are looked up again. Unrelated files remain."""
        self.__dict__.pop("_journal", None)
        if (folder := self._folder) is not None and folder.is_dir():
            for path in folder.glob("*.jsonl"):
                path.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()

    def _answers(
        self, bodies: Iterable[EncodeBody]
    ) -> Generator[tuple[str, EncodeBody, EncodeAnswer], None, None]:
        """Send each body to a server and, if this fails, to other servers. Yields the server's
        address, the body, and the answer."""
        jobs, running = deque(map(_Job, bodies)), _Running()
        last_error = ServingError("No server is healthy")
        with ThreadPoolExecutor(_AT_ONCE * len(self._members), "blockattn-rag-encode") as threads:
            try:
                while jobs or any(job for _, job in running.values()):
                    self._start(jobs, running, threads)
                    if not running:
                        raise last_error
                    for request in wait(running, self._wait_s(), FIRST_COMPLETED).done:
                        member, job = running.pop(request)
                        member.requests -= job is not None
                        try:
                            answer = request.result()
                        except ServingError as error:
                            last_error = error
                            self._set_aside(member, job, error)
                            jobs.extendleft([job] if job else [])
                            continue
                        if job is None:
                            is_compared = answer or self._stored_text is None
                            member.check_at = None if is_compared else 0.0
                        else:
                            self._note_stored(member, job.body.texts[-1])
                            yield member.server.url, job.body, answer
            finally:  # After an error or an interrupt, cancel queued requests.
                for request in running:
                    request.cancel()

    def _start(self, jobs: deque[_Job], running: _Running, threads: ThreadPoolExecutor) -> None:
        """Start the checks that are due, and as many requests as the healthy servers accept. The
        first request is sent alone, so that the other servers can be checked for its passages."""
        now, is_first = time.monotonic(), self._stored_text is None and len(self._members) > 1
        for member in self._members:
            if member.check_at is not None and member.check_at <= now:
                member.check_at = _BEING_CHECKED
                running[threads.submit(self._check, member.server)] = (member, None)
        while free := [m for m in self._members if m.check_at is None and m.requests < _AT_ONCE]:
            if is_first and any(member.requests for member in self._members):
                return
            free.sort(key=lambda member: member.requests)
            pairs = ((member, job) for member in free for job in jobs if member not in job.failed)
            if (pair := next(pairs, None)) is None:
                return
            member, job = pair
            jobs.remove(job)
            member.requests += 1
            running[threads.submit(member.server.send, job.body)] = (member, job)

    def _wait_s(self) -> float | None:
        """Return the seconds until the next check, or None if no check is scheduled."""
        until = min(_BEING_CHECKED if m.check_at is None else m.check_at for m in self._members)
        return None if until == _BEING_CHECKED else max(0.0, until - time.monotonic())

    def _set_aside(self, member: _Member, job: _Job | None, error: ServingError) -> None:
        """Stop using a server until a check succeeds. Raises the error if no retry can help."""
        status = getattr(error.__cause__, "status_code", 500)
        if job is not None:
            job.failed.append(member)
        is_final = job is not None and all(known in job.failed for known in self._members)
        if (status < 500 and status not in (408, 429)) or is_final:
            raise error
        if job is None:
            member.check_at = time.monotonic() + _CHECK_AGAIN_S
        elif member.check_at is None:
            logger.warning("%s; other servers receive its passages until it is healthy", error)
            member.check_at = 0.0

    def _check(self, server: Server) -> bool:
        """Check that a server is healthy, is configured like the others, and has a passage that
        another server stored. Returns False if no passage has been stored yet."""
        if _identity(server.check()) != _identity(self.info):
            raise ValueError(
                f"{server.url} has a different model, recipe or namespace from another server; "
                "pass servers with the same configuration"
            )
        if (text := self._stored_text) is not None and not server.is_stored(text):
            raise ValueError(
                f"{server.url} does not have a passage that another server has just stored; pass "
                "servers that share a store"
            )
        return text is not None

    def _note_stored(self, member: _Member, text: str) -> None:
        """Record a stored passage. After the first, schedule a check that other servers have it."""
        if self._stored_text is None:
            for other in self._members:
                if other is not member and other.check_at is None:
                    other.check_at = 0.0
        self._stored_text = text


@dataclass(eq=False, slots=True)
class _Member:
    """Server with the time of its next check (``time.monotonic``; None if it is healthy), and its
    number of running requests."""

    server: Server
    check_at: float | None
    requests: int = 0


@dataclass(eq=False, slots=True)
class _Job:
    """Body to send, and the servers on which it has failed."""

    body: EncodeBody
    failed: list[_Member] = field(default_factory=list)


_Running = dict[Future[Any], tuple[_Member, _Job | None]]
"""Running requests and checks, with their servers. Checks have no job."""


class Journal:
    """Folder of JSON-lines files that record stored passages, and the servers that reported them.

    A line has ``passage`` (the first characters of the text), ``handle``, ``server``, ``done``
    (``"encoded"``, or ``"found"`` if the passage was already stored) and ``identity``. Lines with
    another identity are ignored, as are incomplete lines after a crash. Each process appends to its
    own file, so several machines can share the folder.

    Args:
        folder: Path of the folder. Created when the first line is written.
        identity: Digest of the model, recipe and namespace that the passages belong to.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.jsonl"
        self._path, self._identity = folder / name, identity
        self.done: set[str] = set()
        """Handles of the recorded passages."""
        for path in sorted(folder.glob("*.jsonl")):
            with path.open(encoding="utf-8") as lines:
                self.done.update(filter(None, map(self._handle, lines)))

    def _handle(self, line: str) -> str | None:
        try:
            record = json.loads(line)
            return str(record["handle"]) if record["identity"] == self._identity else None
        except (ValueError, TypeError, KeyError):
            return None

    def add(self, server: str, body: EncodeBody, answer: EncodeAnswer) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        records = [
            {
                "passage": text[:_EXCERPT],
                "handle": handle_of(text),
                "server": server,
                "done": outcome,
                "identity": self._identity,
            }
            for text, outcome in zip(body.texts, answer.passages, strict=True)
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{json.dumps(record)}\n" for record in records))
        self.done.update(str(record["handle"]) for record in records)


def first_reachable(servers: Sequence[S]) -> S:
    """Return the first server that responds. Raises the last one's ServingError if none does."""
    for server in servers[:-1]:
        try:
            _ = server.info
        except ServingError as error:
            logger.warning("%s", error)
        else:
            return server
    _ = servers[-1].info
    return servers[-1]


def _identity(info: ServerInfo) -> str:
    parts = [info.fingerprint, info.namespace, *info.recipe.encoding]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _bodies(texts: Iterable[str]) -> Iterator[EncodeBody]:
    """Group texts into request bodies. A long text is sent in a separate request."""
    batch: list[str] = []
    for text in texts:
        size = sum(map(len, batch)) + len(text)
        if batch and (len(batch) == _BATCH_PASSAGES or size > _BATCH_CHARACTERS):
            yield EncodeBody(tuple(batch))
            batch = []
        batch.append(text)
    if batch:
        yield EncodeBody(tuple(batch))
