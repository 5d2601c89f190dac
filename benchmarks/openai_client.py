"""Questions with passages, and a client that sends them to a server like an OpenAI client.

Times are in seconds, measured with a monotonic clock.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx

from blockattn_rag import ServerClient
from blockattn_rag.engine.ingest import EncodeStats
from blockattn_rag.prompts.blocks import BlockPrompt, Span
from blockattn_rag.prompts.chat_template import chat_spans
from blockattn_rag.prompts.formats import CHAT, Passage
from blockattn_rag.server.protocol import OPENAI
from tests_vllm.server import KEY, NAME, Server

VLLM = "/v1"
"""Base URL of vLLM's own routes."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question and its passages, in prompt order."""

    text: str
    passages: tuple[Passage, ...] = ()

    @property
    def texts(self) -> list[str]:
        """Return the canonical text of each passage."""
        return [CHAT.canonical_text(one) for one in self.passages]

    @property
    def documents(self) -> dict[str, Any]:
        """Return the body of a chat with the passages as documents."""
        documents = [{"title": one.title, "text": one.text} for one in self.passages]
        return {"messages": [{"role": "user", "content": self.text}], "documents": documents}

    @property
    def parts(self) -> dict[str, Any]:
        """Return the body of a chat with the passages as content parts, without other text."""
        parts = [{"type": "text", "text": text} for text in (*self.texts, self.text)]
        return {
            "messages": [{"role": "user", "content": parts}],
            "blockattn": {"parts": "passages"},
        }

    @property
    def plain(self) -> dict[str, Any]:
        """Return the body of a chat with the same text as ``documents``, for plain vLLM."""
        if not self.passages:
            return {"messages": [{"role": "user", "content": self.text}]}
        spans = CHAT.user_spans([Span(self.text, "conversation")], self.passages)
        text = BlockPrompt.from_spans(spans, CHAT.template).text
        messages = [{"role": "system", "content": CHAT.system}, {"role": "user", "content": text}]
        return {"messages": messages}

    def documents_prompt(self, tokenizer: Any) -> BlockPrompt:
        """Return the prompt that the server renders from ``documents``."""
        return CHAT.prompt(self.text, self.passages, tokenizer)

    def parts_prompt(self, tokenizer: Any) -> BlockPrompt:
        """Return the prompt that the server renders from ``parts``."""
        passages = [Span(text, "passage") for text in self.texts]
        content = (*passages, Span(self.text, "conversation"))
        spans = chat_spans(tokenizer, [{"role": "user", "content": content}])
        return BlockPrompt.from_spans(spans, CHAT.template)


class FailedAnswerError(Exception):
    """The server returned an error. ``status``: HTTP status; None if the stream was interrupted."""

    def __init__(self, status: int | None, message: str) -> None:
        super().__init__(f"{status or 'a stream'}: {message}")
        self.status = status


@dataclass(slots=True)
class Answer:
    """An answer as received by the client.

    Args:
        sent_s: Time of the request.
        times_s: Arrival time of each token.
        tokens: Token ids.
        prompt_tokens: Number of prompt tokens.
        cached_tokens: Number of prompt tokens that the server did not compute for this answer.
        report: The answer's ``blockattn`` field. Empty for servers without this package.
    """

    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def ttft_s(self) -> float:
        """Time to first token in seconds."""
        return self.times_s[0] - self.sent_s

    def add(self, event: dict[str, Any]) -> None:
        """Process an event of the stream. Raises FailedAnswerError if it is an error."""
        if error := event.get("error"):
            raise FailedAnswerError(None, str(error.get("message", error)))
        for choice in event["choices"]:
            new = choice.get("token_ids") or []
            self.tokens += new
            self.times_s += [time.perf_counter()] * len(new)
        self.report = event.get("blockattn") or self.report
        if usage := event.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            self.prompt_tokens = usage["prompt_tokens"]
            self.cached_tokens = details.get("cached_tokens") or 0


async def ask(
    http: httpx.AsyncClient,
    server: Server,
    body: dict[str, Any],
    *,
    route: str = OPENAI,
    leave_after: int | None = None,
    into: Answer | None = None,
) -> Answer:
    """Stream the greedy answer to a chat.

    Args:
        route: Base URL of the chat route.
        leave_after: Number of tokens after which to close the stream.
        into: Answer to fill as tokens arrive, for callers that read it before it is complete.

    Raises:
        FailedAnswerError: The server returned an error, or the stream was interrupted.
        httpx.TransportError: The server is unreachable, or stopped.
    """
    answer = Answer() if into is None else into
    answer.sent_s = time.perf_counter()
    streamed = {
        "model": NAME,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "temperature": 0,
        **body,
    }
    url = f"{server.http.base_url}{route}/chat/completions"
    headers = {"Authorization": f"Bearer {KEY}"}
    async with http.stream("POST", url, json=streamed, headers=headers) as response:
        if response.is_error:
            raise FailedAnswerError(response.status_code, _reason(await response.aread()))
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                answer.add(json.loads(line.removeprefix("data: ")))
                if leave_after is not None and len(answer.tokens) >= leave_after:
                    break
    return answer


def _reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return content.decode(errors="replace")[:500]


def encode(server: Server, texts: Sequence[str]) -> EncodeStats:
    """Encode passages that are missing in a server's store, in the format of documents in chats.

    Args:
        texts: Canonical texts of the passages.
    """
    client = ServerClient(str(server.http.base_url), KEY)
    return client.encode([*dict.fromkeys(texts)])
