"""A local server that answers like ``vllm serve`` with this package's connector. The code of the
real server parses request bodies and builds prompts; an engine in this process replaces vLLM."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from blockattn_rag import BlockAttentionEngine
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.engine.results import Generation
from blockattn_rag.errors import MissError, ProtocolError
from blockattn_rag.model import BlockModel
from blockattn_rag.prompts.blocks import Block
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.server.profile import profile_of
from blockattn_rag.server.protocol import (
    ENCODE,
    INFO,
    OPENAI,
    EncodeAnswer,
    EncodeBody,
    Outcome,
    ServerInfo,
    marker_key_id,
)
from blockattn_rag.server.vllm.bodies import ChatBody, CompletionBody
from blockattn_rag.server.vllm.openai import Prompts
from blockattn_rag.store import KVStore, MemoryStore

CHATS = f"{OPENAI}/chat/completions"
COMPLETIONS = f"{OPENAI}/completions"
_TAKEN = {
    *("model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "seed"),
    *("stop", "stream", "stream_options", "response_format", "chat_template_kwargs", "tools"),
    *("tool_choice", "parallel_tool_calls", "top_p", "logprobs", "n"),
}


class RefusalError(Exception):
    """Error response of the server."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FakeServer:
    """Server over a model and a store.

    Args:
        store: Store of the blocks.
        recipe: Recipe that passages are encoded with.
        name: Name of the model.
        api_key: Key that requests must contain.
        read_only: Whether to refuse to encode passages.
    """

    def __init__(
        self,
        model: BlockModel,
        store: KVStore | None = None,
        *,
        recipe: Recipe = Recipe(),  # noqa: B008 -- frozen
        name: str = "the-model",
        api_key: str | None = None,
        read_only: bool = False,
    ) -> None:
        self.engine = BlockAttentionEngine(
            model, store or MemoryStore(1 << 28), recipe=recipe, read_only=read_only,
            on_miss="error" if read_only else "compute", resident_bytes=0,
        )  # fmt: skip
        self.prompts = Prompts(model.tokenizer.tokenizer, recipe.promote)
        self.api_key = api_key
        self.faults: deque[Exception] = deque()
        """Exceptions to raise instead of the next answers, in order."""
        self.requests: list[tuple[str, Any]] = []
        """Path and body of each received request."""
        self.report: dict[str, Any] = {}
        """Fields that override those of every report."""
        profile = profile_of(model, recipe)
        self.info: dict[str, Any] = ServerInfo(
            fingerprint=profile.fingerprint, tokenizer=profile.tokenizer, sink=profile.recipe.sink,
            adapter=profile.recipe.adapter, promote=profile.recipe.promote,
            recompute=profile.recipe.recompute, block_tuned=profile.block_tuned, models=(name,),
            max_tokens=model.max_context_tokens, namespace="", read_only=read_only,
            has_chat_template=self.prompts.has_chat_template, marker_key=marker_key_id(),
        ).to_dict()  # fmt: skip
        self.url = ""

    def bodies(self, path: str) -> list[Any]:
        """Return the bodies of the requests to a path."""
        return [body for asked, body in self.requests if asked == path]

    @contextmanager
    def listening(self) -> Iterator[FakeServer]:
        """Serve on a free port of the loopback interface."""
        with ThreadingHTTPServer(("127.0.0.1", 0), _handler(self)) as http:
            self.url = f"http://127.0.0.1:{http.server_port}"
            thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            try:
                yield self
            finally:
                http.shutdown()
                thread.join()

    def encode(self, fields: Any) -> dict[str, Any]:
        body = EncodeBody.from_dict(fields)
        blocks = [Block(text.strip(), CHAT.template) for text in body.texts]
        stored = [self.engine.contains(block) for block in blocks]
        if body.only_look:
            seen: list[Outcome] = ["found" if one else "missing" for one in stored]
            return EncodeAnswer(tuple(seen)).to_dict()
        if self.engine.access.read_only and not all(stored):
            raise RefusalError(409, "blocks are not stored, and this server is read_only")
        stats = self.engine.precompute(blocks)
        outcomes: list[Outcome] = ["found" if one else "encoded" for one in stored]
        return EncodeAnswer(tuple(outcomes), stats.computed_tokens, stats.stored_bytes).to_dict()

    def generation(self, path: str, fields: Any) -> tuple[Generation, dict[str, Any]]:
        """Answer a chat or completion request. Returns the answer and the report on its blocks."""
        body: ChatBody | CompletionBody
        if path == CHATS:
            body = ChatBody.from_dict(fields)
            prompt = self.prompts.chat(body, [], body.fields.get("chat_template_kwargs") or {})
        else:
            body = CompletionBody.from_dict(fields)
            prompt = self.prompts.completion(body)
        if unknown := body.fields.keys() - _TAKEN:
            raise RefusalError(400, f"found {', '.join(sorted(unknown))}")
        mode = body.options.mode if body.has_passages else "full"
        limit = fields.get("max_tokens") or fields.get("max_completion_tokens") or 16
        schema = (fields.get("response_format") or {}).get("json_schema", {}).get("schema")
        options: dict[str, Any] = {"structured_outputs": {"json": schema}} if schema else {}
        answer = self.engine.generate(
            prompt, mode=mode, max_new_tokens=limit, temperature=fields.get("temperature", 0.0),
            stop=fields.get("stop"), **options,
        )  # fmt: skip
        report: dict[str, Any] = {"mode": mode}
        if mode == "block":
            report |= {**answer.stats.reuse(), "recipe": answer.stats.recipe}
        return answer, {**report, **self.report}


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Discard log messages."""

        def do_GET(self) -> None:
            self._respond(None)

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _respond(self, body: Any) -> None:
            try:
                self._answer(body)
            except RefusalError as error:
                self._refuse(error.status, str(error))
            except MissError as error:
                self._refuse(409, str(error))
            except ProtocolError as error:
                self._refuse(400, str(error))

        def _refuse(self, status: int, message: str) -> None:
            self._send({"error": {"message": message, "code": status}}, status)

        def _answer(self, body: Any) -> None:
            if self.path == "/health":  # requires no key
                self._send({})
                return
            if server.api_key and self.headers["Authorization"] != f"Bearer {server.api_key}":
                raise RefusalError(401, "Unauthorized")
            server.requests.append((self.path, body))
            if server.faults:
                raise server.faults.popleft()
            if self.path == INFO:
                self._send(server.info)
            elif self.path == f"{OPENAI}/models":
                self._send({"data": [{"id": server.info["models"][0]}], "object": "list"})
            elif self.path == ENCODE:
                self._send(server.encode(body))
            elif self.path in (CHATS, COMPLETIONS):
                self._complete(body)
            else:
                raise RefusalError(404, f"no {self.path}")

        def _complete(self, body: Any) -> None:
            if body["model"] not in server.info["models"]:
                raise RefusalError(404, f"The model {body['model']!r} does not exist")
            answer, report = server.generation(self.path, body)
            is_chat, end = self.path == CHATS, {"finish_reason": answer.finish_reason, "index": 0}
            details = {"cached_tokens": answer.stats.reused_tokens}
            usage = {
                "prompt_tokens": answer.stats.prompt_tokens,
                "completion_tokens": answer.stats.generated_tokens,
                "total_tokens": answer.stats.prompt_tokens + answer.stats.generated_tokens,
                "prompt_tokens_details": details,
            }
            own = {"id": "1", "created": 1, "model": body["model"]}
            if not body.get("stream"):
                own["object"] = "chat.completion" if is_chat else "text_completion"
                message = {"role": "assistant", "content": answer.text}
                said = {"message": message} if is_chat else {"text": answer.text}
                self._send(
                    {**own, "choices": [{**said, **end}], "usage": usage, "blockattn": report}
                )
                return
            own["object"] = "chat.completion.chunk" if is_chat else "text_completion"
            half = len(answer.text) // 2
            events = []
            for text in (answer.text[:half], answer.text[half:]):
                said = {"delta": {"content": text}} if is_chat else {"text": text}
                events.append({**own, "choices": [{**said, "index": 0, "finish_reason": None}]})
            last: dict[str, Any] = {"delta": {}} if is_chat else {"text": ""}
            events.append({**own, "choices": [{**last, **end}], "blockattn": report})
            if (body.get("stream_options") or {}).get("include_usage"):
                events.append({**own, "choices": [], "usage": usage})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            data = "".join([*lines, "data: [DONE]\n\n"]).encode()
            self._write(data, 200, "text/event-stream")

        def _send(self, value: Any, status: int = 200) -> None:
            self._write(json.dumps(value).encode(), status, "application/json")

        def _write(self, data: bytes, status: int, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if status == 409:
                self.send_header("x-should-retry", "false")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
