"""HTTP client of one server: JSON, event streams, retries, and the event loop that they run in."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import weakref
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Mapping,
)
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from blockattn_rag.engine.threads import start_thread
from blockattn_rag.errors import MissError, ServingError

T = TypeVar("T")

API_KEY_VARIABLE = "BLOCKATTN_RAG_API_KEY"
"""Environment variable with the default API key."""

_CONNECT_S = 10.0
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MOST_CONNECTIONS = 1000

_PASSING = frozenset({429, 500, 502, 503, 504})
"""Statuses worth a retry. vLLM also answers 500 when it cannot load the KV of a prompt."""


class Background:
    """Event loop in a background thread. It starts at first use and ends with the process.

    Connections belong to an event loop. With one loop for the whole process, all threads and event
    loops share the same connections.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop. Raises RuntimeError if no thread can be started."""
        with self._lock:
            if self._loop is None:
                started: Future[asyncio.AbstractEventLoop] = Future()
                stop = asyncio.Event()
                start_thread(
                    lambda: asyncio.run(_run_until(stop, started)),
                    "blockattn-remote",
                    lambda: started.result().call_soon_threadsafe(stop.set),
                )
                self._loop = started.result()
            return self._loop

    @property
    def running(self) -> asyncio.AbstractEventLoop | None:
        """The loop, unless it has not started or has ended."""
        return None if self._loop is None or self._loop.is_closed() else self._loop

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


async def _run_until(stop: asyncio.Event, started: Future[asyncio.AbstractEventLoop]) -> None:
    started.set_result(asyncio.get_running_loop())
    await stop.wait()


background = Background()

if hasattr(os, "register_at_fork"):
    # A forked process has none of its parent's threads.
    os.register_at_fork(after_in_child=background.__init__)  # type: ignore[misc]


class PassingError(Exception):
    """Temporary failure, worth a retry after ``pause_s`` seconds. Users get a ServingError."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = _PAUSE_S if pause_s is None else min(pause_s, _LONGEST_PAUSE_S)


class Client:
    """HTTP client of one server, for coroutines in the event loop of ``background``.

    Args:
        base_url: Address of the server, with or without a trailing ``/v1``.
        api_key: Bearer token. Never shown in messages.
        timeout_s: Seconds to wait for the next byte of an answer.
        retries: Maximum number of retries after temporary failures.
        headers: Headers of every request.

    Raises:
        ValueError: The address is invalid or contains a password, or the key is invalid.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        timeout_s: float,
        retries: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.base_url = server_url(base_url)
        self.retries = retries
        self._timeout = httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s), pool=None)
        key = {"Authorization": f"Bearer {_sendable(api_key)}"} if api_key else {}
        self._headers = {**(headers or {}), **key}
        self._http: httpx.AsyncClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str) -> Any:
        """Get JSON.

        Raises:
            PassingError: No answer, or a failure worth a retry.
            MissError: Blocks are missing, and the server may not encode them.
            ServingError: The server rejects the request.
        """
        async with self._answer("GET", path, None) as response:
            return _parsed(await response.aread())

    async def post(self, path: str, body: Any) -> Any:
        """Post JSON and return the answer. Raises the same errors as ``get``."""
        async with self._answer("POST", path, body) as response:
            return _parsed(await response.aread())

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Post JSON and yield the events of the answer. Raises the same errors as ``get``.

        Closing the generator closes the connection, so the server stops generating.
        """
        async with self._answer("POST", path, body) as response:
            async for line in _lines(response):
                if not line.startswith(b"data:"):  # a comment, or the end of an event
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    return
                event = _parsed(data)
                if isinstance(event, dict) and "error" in event:
                    raise self._failure(event, None)
                yield event
        raise PassingError(f"{self.base_url} closed the connection in the middle of an answer")

    async def retried(
        self, ask: Callable[[], Awaitable[T]], may_retry: Callable[[], bool] = lambda: True
    ) -> T:
        """Call ``ask``, and retry after temporary failures.

        Args:
            may_retry: Function that decides after each failure whether a retry is possible.

        Raises:
            ServingError: The server rejects the request, or every attempt failed.
        """
        for left in range(self.retries, -1, -1):
            try:
                return await ask()
            except PassingError as error:
                if not (left and may_retry()):
                    raise ServingError(str(error)) from error
                await asyncio.sleep(error.pause_s)
        raise AssertionError("retries must be 0 or more")

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: Any) -> AsyncIterator[httpx.Response]:
        """Send a request. Yields a successful response, whose body is not read yet."""
        try:
            async with self._connections().stream(
                method, self.base_url + path, json=body, headers=self._headers
            ) as response:
                if not response.is_success:
                    raise self._failure(_parsed(await response.aread()), response)
                yield response
        except httpx.ReadTimeout as error:  # no retry: the server may be overloaded
            raise ServingError(
                f"{self.base_url} sent nothing for {self._timeout.read:g} seconds; raise "
                "timeout_s, or reduce the load"
            ) from error
        except httpx.TransportError as error:
            raise PassingError(f"cannot reach {self.base_url}: {error or repr(error)}") from error
        except httpx.RequestError as error:
            raise ServingError(f"cannot read the answer of {self.base_url}: {error}") from error

    def _connections(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:  # a new loop after a fork
            limits = httpx.Limits(max_connections=_MOST_CONNECTIONS)
            self._http = httpx.AsyncClient(timeout=self._timeout, limits=limits)
            self._loop = loop
            weakref.finalize(self, _close, loop, self._http).atexit = False
        return self._http

    def _failure(self, answer: Any, response: httpx.Response | None) -> Exception:
        """Exception for an error that the server reports. ``response``: None inside a stream."""
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        fields = error if isinstance(error, dict) else {"message": error}
        code = fields.get("code") if response is None else response.status_code
        message = f"{self.base_url} answers {code}: {str(fields.get('message', fields))[:1000]}"
        if type(code) is int and code in _PASSING:
            return PassingError(message, _retry_after(response))
        if code == 409:
            return MissError(message)
        if code in (401, 403):
            message += f"; pass the server's key as api_key, or set {API_KEY_VARIABLE}"
        return RefusedError(message, code)


class RefusedError(ServingError):
    """Raised if the server rejects a request. ``status``: HTTP status of the response."""

    def __init__(self, message: str, status: object) -> None:
        super().__init__(message)
        self.status = status


def server_url(base_url: str) -> str:
    """Validate a server's address, and remove a trailing ``/v1``.

    Raises:
        ValueError: The address is invalid, or contains a user name or password.
    """
    given = base_url.strip() if isinstance(base_url, str) else ""
    if "@" in given:
        raise ValueError(
            "found a user or password in the server's address, which appears in messages; pass a "
            "key as api_key instead"
        )
    try:
        parts = urlsplit(str(httpx.URL(given)))
        is_address = parts.port != 0 and not parts.query and not parts.fragment
    except (ValueError, httpx.InvalidURL):
        is_address = False
    if not is_address or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"invalid server address {base_url!r:.200}: expected one such as http://gpu:8000 or "
            "https://gpu/v1"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _sendable(api_key: str) -> str:
    is_text = isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()
    if not is_text or " " in api_key:
        # The message does not show the key.
        raise ValueError("invalid API key: expected printable ASCII characters without spaces")
    return api_key


def _parsed(data: bytes) -> Any:
    """Parse a body as JSON. Returns the text if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a response. httpx would also split at separators inside JSON strings."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _retry_after(response: httpx.Response | None) -> float | None:
    value = "" if response is None else response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else None


def _close(loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient) -> None:
    """Close the connections of a garbage-collected client."""
    if loop is background.running:
        loop.call_soon_threadsafe(lambda: loop.create_task(http.aclose()))
