"""One server over HTTP: JSON there and back, answers as streams of events, a second try."""

from __future__ import annotations

import asyncio
import json
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from blockattn_rag.errors import MissError, ServingError
from blockattn_rag.server.client.background import background

T = TypeVar("T")

API_KEY_VARIABLE = "BLOCKATTN_RAG_API_KEY"
"""Environment variable with the API key, where none is given."""

_CONNECT_S = 10.0
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_MOST_CONNECTIONS = 1000

_PASSING = frozenset({429, 500, 502, 503, 504})
"""Statuses of failures that may be gone at the next try. vLLM says 500 also where it could not load
the keys and values of a prompt."""


class PassingError(Exception):
    """A failure that may be gone at the next try. Callers see a ServingError in its place.

    ``pause_s``: how long to wait before.
    """

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = _PAUSE_S if pause_s is None else min(pause_s, _LONGEST_PAUSE_S)


class Client:
    """Asks one server, in the event loop of ``background``.

    Args:
        base_url: address of the server, with or without ``/v1`` at its end.
        api_key: sent as a bearer token; never shown.
        timeout_s: seconds without a byte of an answer after which it is given up.
        retries: further tries after failures that may pass.
        headers: sent with every request.

    Raises:
        ValueError: the address is none, or holds a password; or the key cannot be sent.
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
        """What the server says at a path, as JSON.

        Raises:
            PassingError: no answer, or one of a failure that may pass.
            MissError: blocks are missing that the server may not encode.
            ServingError: the server refuses; says why.
        """
        async with self._answer("GET", path, None) as response:
            return _parsed(await response.aread())

    async def post(self, path: str, body: Any) -> Any:
        """``get``, with something to say."""
        async with self._answer("POST", path, body) as response:
            return _parsed(await response.aread())

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The events of an answer, each as JSON, as they come. Raises as ``get``.

        Leaving the generator closes the stream, by which the server knows that nobody waits.
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
        raise PassingError(f"{self.base_url} ended its answer in the middle")

    async def retried(
        self, ask: Callable[[], Awaitable[T]], may_retry: Callable[[], bool] = lambda: True
    ) -> T:
        """What is asked for, maybe after failures.

        Args:
            may_retry: whether to try again, asked after each failure.

        Raises:
            ServingError: the server refuses, or it failed each time.
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
        """An answer whose head has come, and says that all is well."""
        try:
            async with self._connections().stream(
                method, self.base_url + path, json=body, headers=self._headers
            ) as response:
                if not response.is_success:
                    raise self._failure(await response.aread(), response)
                yield response
        except httpx.ReadTimeout as error:  # no new try: the server may have too much to do
            raise ServingError(
                f"{self.base_url} said nothing for {self._timeout.read:g} seconds; give it longer "
                "by timeout_s, or less to do"
            ) from error
        except httpx.TransportError as error:
            raise PassingError(f"cannot reach {self.base_url}: {error or repr(error)}") from error
        except httpx.RequestError as error:
            raise ServingError(f"cannot read what {self.base_url} answers: {error}") from error

    def _connections(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        if self._http is None or self._loop is not loop:  # another one since a fork
            limits = httpx.Limits(max_connections=_MOST_CONNECTIONS)
            self._http = httpx.AsyncClient(timeout=self._timeout, limits=limits)
            self._loop = loop
            weakref.finalize(self, _close, loop, self._http).atexit = False
        return self._http

    def _failure(self, told: Any, response: httpx.Response | None) -> Exception:
        """What a server's error means; ``response``: what it came with, if not in a stream."""
        told = _parsed(told) if isinstance(told, bytes) else told
        error = told.get("error", told) if isinstance(told, dict) else told
        fields = error if isinstance(error, dict) else {"message": error}
        said = fields.get("message", fields)
        code = fields.get("code") if response is None else response.status_code
        message = f"{self.base_url} answers {code}: {str(said)[:1000]}"
        if type(code) is int and code in _PASSING:
            return PassingError(message, _retry_after(response))
        if code == 409:
            return MissError(message)
        if code in (401, 403):
            message += f"; give the server's key by api_key, or in {API_KEY_VARIABLE}"
        return RefusedError(message, code)


class RefusedError(ServingError):
    """A server refuses; ``status`` is the HTTP status of its refusal."""

    def __init__(self, message: str, status: object) -> None:
        super().__init__(message)
        self.status = status


def server_url(base_url: str) -> str:
    """An address without the ``/v1`` that OpenAI's clients want at its end.

    Raises:
        ValueError: it is no address of a server, or holds a user's name or password.
    """
    given = base_url.strip() if isinstance(base_url, str) else ""
    if "@" in given:
        raise ValueError(
            "found a user or password in a server's address, which messages show; give a key by "
            "api_key"
        )
    try:
        parts = urlsplit(str(httpx.URL(given)))
        is_address = parts.port != 0 and not parts.query and not parts.fragment
    except (ValueError, httpx.InvalidURL):
        is_address = False
    if not is_address or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            "a server's address must be such as http://gpu:8000 or https://gpu/v1; found "
            f"{base_url!r:.200}"
        )
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


def _sendable(api_key: str) -> str:
    is_text = isinstance(api_key, str) and api_key.isascii() and api_key.isprintable()
    if not is_text or " " in api_key:
        # The key itself is not shown.
        raise ValueError(
            "an API key has printable ASCII characters and no blanks; this one differs"
        )
    return api_key


def _parsed(data: bytes) -> Any:
    """JSON, or, of what is none, its text."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of an answer. Those of httpx end also at separators that JSON texts may hold."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
    yield rest


def _retry_after(response: httpx.Response | None) -> float | None:
    said = "" if response is None else response.headers.get("Retry-After", "")
    return float(said) if said.isdecimal() else None


def _close(loop: asyncio.AbstractEventLoop, http: httpx.AsyncClient) -> None:
    """Close the connections of a client that is gone."""
    if loop is background.running:
        loop.call_soon_threadsafe(lambda: loop.create_task(http.aclose()))
