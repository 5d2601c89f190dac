"""Client of a block-mode server, for ingestion, questions and server information."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast
from urllib.parse import urlsplit

import httpx
import openai

from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.engine.results import Mode, ReuseStats
from blockattn_rag.errors import MissError, ProtocolError, ServingError
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.markers import wrap
from blockattn_rag.server.pool import ServerPool
from blockattn_rag.server.protocol import (
    ENCODE,
    FIELD,
    INFO,
    OPENAI,
    EncodeAnswer,
    EncodeBody,
    ServerInfo,
    marker_key_id,
)

API_KEY_VARIABLE = "BLOCKATTN_RAG_API_KEY"
"""Environment variable with the default API key."""

_HEALTH, _CHECK_TIMEOUT_S = "/health", 30.0
_COUNTS = ("hits", "misses", "reused_tokens", "computed_tokens")


class ServerClient:
    """Client of a vLLM server with this package's connector (``blockattn-rag serve``).

    Args:
        url: Address of the server, such as ``"http://gpu:8000"``, with or without ``/v1``.
        api_key: API key of the server. Default: the environment variable
            ``BLOCKATTN_RAG_API_KEY``.
        timeout_s: Seconds to wait for a connection, and then for each part of a response.
        retries: Maximum number of retries of a request after temporary failures.

    Raises:
        ValueError: The address or the key is invalid.
    """

    def __init__(
        self, url: str, api_key: str | None = None, *, timeout_s: float = 600.0, retries: int = 2
    ) -> None:
        self.url = server_url(url)
        api_key = api_key or os.environ.get(API_KEY_VARIABLE) or "none"
        if not api_key.isascii() or not api_key.isprintable() or " " in api_key:
            # The message omits the key, because messages may be logged.
            raise ValueError("Invalid API key: expected printable ASCII characters without spaces")
        self.openai = openai.OpenAI(
            base_url=self.openai_url, api_key=api_key, timeout=timeout_s, max_retries=retries
        )

    @property
    def openai_url(self) -> str:
        return self.url + OPENAI

    @cached_property
    def info(self) -> ServerInfo:
        """Server information, fetched on first use.

        Raises:
            ServingError: The server is unreachable, rejects the API key, has no connector, or uses
                a different protocol version.
        """
        try:
            return ServerInfo.from_dict(self._ask(INFO))
        except ProtocolError as error:
            raise ServingError(f"{self.url}: {error}") from error

    def check(self) -> ServerInfo:
        """Check the server's health, and return its current information. ``info`` stays cached.

        Raises:
            ServingError: The server is unhealthy or does not respond within 30 seconds; see also
                ``info``.
        """
        probe = ServerClient(self.url, self.openai.api_key, timeout_s=_CHECK_TIMEOUT_S, retries=0)
        with probe.openai:
            with probe._translated(_HEALTH):
                probe.openai.get(self.url + _HEALTH, cast_to=httpx.Response)
            return probe.info

    def check_markers(self) -> None:
        """Raise ServingError if the server's marker key differs from this installation's."""
        if self.info.marker_key != marker_key_id():
            raise ServingError(
                f"{self.url} has a different marker key, so it would treat markers as plain text; "
                "set the environment variable BLOCKATTN_RAG_MARKER_KEY to the same value on the "
                "server and here (docs/security.md)"
            )

    def encode(
        self,
        texts: Sequence[str],
        *,
        show_progress: bool = False,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> EncodeStats:
        """Encode passages into the server's store; see ``ServerPool.encode``."""
        pool = ServerPool([self])
        return pool.encode(texts, show_progress=show_progress, on_progress=on_progress)

    def is_stored(self, text: str) -> bool:
        """Whether a passage is stored. Raises ServingError if the request fails."""
        return self.send(EncodeBody((text,), only_look=True)).passages == ("found",)

    def send(self, body: EncodeBody) -> EncodeAnswer:
        """Send an encoding or lookup request. Raises MissError or ServingError, like ``encode``."""
        fields = {"texts": body.texts, "only_look": body.only_look}
        answer = EncodeAnswer.from_dict(self._ask(ENCODE, fields))
        if len(answer.passages) != len(body.texts):
            raise ProtocolError(
                f"{self.url} returned results for {len(answer.passages)} passages, expected "
                f"{len(body.texts)}"
            )
        return answer

    def ask(
        self,
        question: str,
        passages: Sequence[str],
        *,
        mode: Mode = "block",
        take: Callable[[str], None] | None = None,
        max_tokens: int = 256,
        schema: Mapping[str, Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, ReuseStats]:
        """Stream the answer to a question, with greedy decoding.

        Args:
            passages: Texts of the passages, in prompt order.
            mode: ``"block"`` reuses passages; ``"full"`` prefills the complete prompt.
            take: Function to call with each piece of the answer.
            max_tokens: Maximum number of tokens in the answer.
            schema: JSON schema that the answer must match.
            chat_template_kwargs: Variables of the model's chat template, if it has one.

        Returns:
            The finish reason, and the server's reuse statistics with times measured by the client.

        Raises:
            MissError: A passage is not stored, and the server is read-only.
            ServingError: The request failed, the stream ended early, or the marker keys differ.
        """
        extra: dict[str, Any] = {FIELD: {"mode": mode}}
        if schema is not None:
            named = {"name": "answer", "schema": dict(schema), "strict": True}
            extra["response_format"] = {"type": "json_schema", "json_schema": named}
        variables = dict(chat_template_kwargs or {})
        started, first, reason, report = time.perf_counter(), None, "", dict[str, Any]()
        tokens = 0
        with self._translated(OPENAI):
            for chunk in self._chunks(question, passages, variables, extra, max_tokens):
                report = (chunk.model_extra or {}).get(FIELD) or report
                tokens = tokens if chunk.usage is None else chunk.usage.completion_tokens
                for choice in chunk.choices:
                    reason = choice.finish_reason or reason
                    text = choice.text if hasattr(choice, "text") else choice.delta.content
                    if text:
                        first = first or time.perf_counter()
                        if take is not None:
                            take(text)
        if not reason:
            raise ServingError(f"{self.url} sent no finish reason; see the server's log")
        now = time.perf_counter()
        stats = ReuseStats(
            report.get("mode", mode),
            **{name: report.get(name, 0) for name in _COUNTS},
            generated_tokens=tokens,
            ttft_s=(first or now) - started,
            total_s=now - started,
            recipe=report.get("recipe", ""),
        )
        return reason, stats

    def _chunks(
        self,
        question: str,
        passages: Sequence[str],
        variables: dict[str, Any],
        extra: dict[str, Any],
        max_tokens: int,
    ) -> Iterable[Any]:
        """Stream a chat answer, or a completion if the model has no chat template."""
        options: dict[str, Any] = {
            "model": self.info.models[0],
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self.info.has_chat_template:
            self.check_markers()
            head, context = f"{CHAT.system}\n\n{CHAT.before}", "".join(map(wrap, passages))
            options["prompt"] = f"{head}{context}{CHAT.after.format(question=question)}"
            return cast(Iterable[Any], self.openai.completions.create(extra_body=extra, **options))
        extra["documents"] = [{"text": text} for text in passages]
        extra["chat_template_kwargs"] = variables
        options["messages"] = [{"role": "user", "content": question}]
        return cast(Iterable[Any], self.openai.chat.completions.create(extra_body=extra, **options))

    def _ask(self, path: str, body: Any = None) -> Any:
        with self._translated(path):
            if body is None:
                response = self.openai.get(self.url + path, cast_to=httpx.Response)
            else:
                response = self.openai.post(self.url + path, cast_to=httpx.Response, body=body)
        try:
            return response.json()
        except ValueError as error:
            raise ProtocolError(f"{self.url} did not return JSON: {error}") from error

    @contextmanager
    def _translated(self, path: str) -> Iterator[None]:
        try:
            yield
        except openai.APIStatusError as error:
            raise self._failure(error, path) from error
        except openai.APITimeoutError as error:
            raise ServingError(
                f"{self.url} sent no data for {self.openai.timeout:g} seconds; reduce the load, or "
                "raise timeout_s (which health checks ignore)"
            ) from error
        except openai.APIConnectionError as error:
            raise ServingError(f"Cannot reach {self.url}: {error.__cause__ or error}") from error
        except (openai.APIError, httpx.HTTPError) as error:
            # During a stream, the connection failed or the server sent an error.
            raise ServingError(f"{self.url} failed in the middle of an answer: {error}") from error

    def _failure(self, error: openai.APIStatusError, path: str) -> ServingError | MissError:
        code = error.status_code
        fields = error.body if isinstance(error.body, dict) else {"message": error.response.text}
        message = f"{self.url} returned status {code}: {str(fields.get('message', fields))[:1000]}"
        if code == 409:
            return MissError(message)
        if code in (401, 403):
            message += f"; pass the server's key as api_key, or set {API_KEY_VARIABLE}"
        if code == 404:
            message = (
                f"{self.url} has no {path}: this package's connector and endpoints are not "
                "configured (docs/guides/serving_vllm.md)"
            )
        return ServingError(message)


def server_url(url: str) -> str:
    """Validate a server's address, and return it without the path of an API, such as ``/v1``.

    Raises:
        ValueError: The address is invalid, or contains a user name or password.
    """
    address = url.strip() if isinstance(url, str) else ""
    if "@" in address:
        raise ValueError(
            "The server's address contains a user name or password, which would appear in "
            "messages; pass a key as api_key instead"
        )
    try:
        parts = urlsplit(str(httpx.URL(address)))
        is_address = parts.port != 0 and not parts.query and not parts.fragment
    except (ValueError, httpx.InvalidURL):
        is_address = False
    if not is_address or parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(
            f"Invalid server address {url!r:.200}: expected an address such as http://gpu:8000 "
            "or https://gpu/v1"
        )
    path = parts.path.rstrip("/").removesuffix(OPENAI).removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc}{path}"
