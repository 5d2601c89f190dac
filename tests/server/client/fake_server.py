"""A server on this machine that speaks as ``vllm serve`` does with this package's connector.

It answers by a model of this process and checks all that it is sent. A test can make it fail.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

from blockattn_rag.engine.detokenizer import Detokenizer
from blockattn_rag.engine.recipe import Recipe
from blockattn_rag.errors import ProtocolError
from blockattn_rag.kv.block_kv import BlockKV
from blockattn_rag.kv.context import Context, place
from blockattn_rag.model import BlockModel, EncodeRequest
from blockattn_rag.model.sampling import Sampling
from blockattn_rag.output.grammar import parse_grammar
from blockattn_rag.prompts.recognition import from_hex
from blockattn_rag.server.keys import BlockId, block_keys
from blockattn_rag.server.profile import profile_of
from blockattn_rag.server.protocol import (
    COMPLETIONS,
    ENCODE,
    INFO,
    TENANT_HEADER,
    BlockPlan,
    EncodeAnswer,
    EncodeBody,
    ServerInfo,
    parse_plan,
)
from blockattn_rag.server.served_blocks import ServedBlocks
from blockattn_rag.store import KVStore, MemoryStore
from blockattn_rag.store.passage_index import PassageIndex
from tests.holding import LONGEST_S
from tests.scripted import Script, Told

_REQUIRED = {"model", "prompt", "max_tokens", "stream", "stream_options", "return_token_ids"}
_TAKEN = {
    *("temperature", "top_p", "top_k", "seed", "stop", "kv_transfer_params"),
    *("repetition_penalty", "min_p", "min_tokens", "ignore_eos", "logit_bias", "response_format"),
    "structured_outputs",
    *("logprobs", "return_tokens_as_token_ids", "cache_salt"),
}


class RefusalError(Exception):
    """What the server answers instead, or in the middle of a stream."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers or {}

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": "Error", "code": self.status}}


class HangupError(Exception):
    """The server ends the connection."""


class EndError(Exception):
    """The server ends its stream as if it were whole."""


Fault = Callable[[int], None]
"""Called before each token of an answer with how many went before; raises what goes wrong."""


def fault(error: Exception, after: int = 0) -> Fault:
    """What raises the error after so many tokens."""

    def raise_it(tokens: int) -> None:
        if tokens >= after:
            raise error

    return raise_it


class FakeServer:
    """A model and a store behind a port.

    Args:
        model: what answers.
        store: where it keeps blocks.
        recipe: by which it encodes blocks.
        name: of the model.
        api_key: without which it refuses.
        read_only: it encodes nothing for the store.
        with_connector: else it is a plain server, and answers in full mode.
        block_tuned: what it says of the model.
        max_tokens: that it takes; default: the model's.
        tenants: whether it keeps them apart; None: their header never arrives.
        keeps: whether it keeps blocks in memory that may not be stored.
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
        with_connector: bool = True,
        block_tuned: bool = True,
        max_tokens: int | None = None,
        tenants: bool | None = None,
        keeps: bool = True,
    ) -> None:
        self.model = model
        self.store = MemoryStore(1 << 28) if store is None else store
        self.passages = PassageIndex(self.store)
        self.kept = MemoryStore(1 << 28)
        """Where blocks are that may not be stored."""
        self.recipe = recipe
        self.profile = profile_of(model, recipe)
        self.api_key = api_key
        self.read_only = read_only
        self.with_connector = with_connector
        self.tenants = tenants
        self.keeps = keeps
        self.info: dict[str, Any] = ServerInfo(
            fingerprint=self.profile.fingerprint,
            tokenizer=self.profile.tokenizer,
            sink=recipe.sink,
            adapter=self.profile.adapter,
            promote=self.profile.promote,
            block_tuned=block_tuned,
            models=(name, "another-model"),
            max_tokens=max_tokens or self.profile.max_positions,
            namespace="",
            read_only=read_only,
        ).to_dict()
        self.requests: list[tuple[str, Any]] = []
        """What was asked: the path, and the body."""
        self.authorizations: list[str | None] = []
        self.encoded: dict[str, int] = {}
        """Tokens of the blocks that were encoded, by key."""
        self.faults: deque[Fault | None] = deque()
        """What goes wrong with the next requests, in their order, that to INFO aside."""
        self.marker: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda told: told
        """What becomes of the figures of an answer in block mode."""
        self.sees_stops = True
        self.script: Script | None = None  # what the model is told to say
        self.at_once = self.most_at_once = 0
        self._pages: dict[object, Context] = {}
        self.left = threading.Event()
        """Set when a client has left a stream."""
        self._lock = threading.Lock()
        self.url = ""

    def bodies(self, path: str) -> list[Any]:
        """What was asked at a path."""
        return [body for at, body in self.requests if at == path]

    # -- what it does ------------------------------------------------------------------------

    def namespace(self, tenant: str | None) -> str:
        """Where blocks are stored and looked for, by the header of a request."""
        if tenant is not None and self.tenants is False:
            raise RefusalError(400, f"Found the header {TENANT_HEADER}")
        return tenant if tenant is not None and self.tenants else ""

    def encode(self, told: Any, namespace: str = "") -> dict[str, Any]:
        """The blocks of a request that are not stored, encoded."""
        body = EncodeBody.from_dict(told)
        if body.model not in (None, self.info["models"][0]):
            raise RefusalError(400, "blocks are encoded by the base model")
        outcomes, stored_bytes = [], 0
        for place_, ids in enumerate(body.blocks):
            first = body.opens_prompt and not place_
            sink_ids = () if first else self.profile.sink_ids
            plan = BlockPlan("encode", (len(ids),), namespace, (body.keep,), first)
            (one,) = block_keys([*sink_ids, *ids], plan, self.profile)
            if one.key in self.store:
                outcomes.append("found")
            elif body.only_look:
                outcomes.append("missing")
            elif self.read_only:
                raise RefusalError(409, "the server is read-only")
            else:
                outcomes.append("encoded")
                stored_bytes += self._encoded(one, first, self.store).nbytes
        if body.index and not body.only_look:
            self.passages.add(from_hex(body.index), namespace)
        return EncodeAnswer(tuple(outcomes), stored_bytes).to_dict()  # type: ignore[arg-type]

    def _encoded(self, one: BlockId, first: bool, store: KVStore) -> BlockKV:
        sink_ids = () if first else self.profile.sink_ids
        request = EncodeRequest(list(one.ids), one.digest, one.digest[:32], sink_ids)
        ((kv,),) = self.model.encode([request])
        if self.recipe.adapter and not first:
            kv = self.recipe.adapter.applied(kv, self.model.profile.layouts)
        kv = replace(kv, namespace=one.namespaces[0])
        assert kv.key == one.key
        store.put(kv.key, kv)
        self.encoded[kv.key] = kv.num_tokens
        return kv

    def _found(self, one: BlockId) -> BlockKV | None:
        kept = self.kept.get(one.key)
        if kept is not None and one.keep.is_stored and not self.read_only:
            self.store.put(one.key, kept)
        return kept or self.store.get(one.key)

    def _blocks(self, ids: list[int], plan: BlockPlan) -> tuple[list[BlockKV], ServedBlocks]:
        encoded, found = [], []
        for one in block_keys(ids, plan, self.profile):
            kv = self._found(one)
            if kv is None and one.keep.is_stored and self.read_only:
                raise RefusalError(409, "the server is read-only")
            if kv is None and not one.keep.is_stored and not self.keeps:
                raise RefusalError(400, "raise private_memory in the connector's options")
            if kv is None:
                store = self.store if one.keep.is_stored else self.kept
                kv = self._encoded(one, not one.place, store)
                encoded.append(kv.num_tokens)
            found.append(kv)
        served = ServedBlocks(
            blocks=len(found),
            loaded_tokens=plan.context_tokens,
            local_tokens=0,
            encoded=len(encoded),
            encoded_tokens=sum(encoded),
        )
        return found, served

    def context(
        self, ids: list[int], plan: BlockPlan | None, salt: str | None
    ) -> tuple[Context, ServedBlocks | None]:
        """What an answer reads, and what is said of it. Pages serve their like again."""
        blocks, served = self._blocks(ids, plan) if plan else ([], None)
        key = self.page_key(ids, plan, salt)
        if served is not None and key in self._pages:
            served = replace(served, loaded_tokens=0, local_tokens=served.loaded_tokens)
        return self._pages.setdefault(key, place(blocks)), served

    def page_key(self, ids: list[int], plan: BlockPlan | None, salt: str | None) -> object:
        """What requests have in common that share pages."""
        return tuple(ids), plan and plan.lengths, salt

    def complete(self, path: str, body: dict[str, Any], write: Callable[[Any], None]) -> None:
        """An answer, as a stream of events."""
        fail = self.faults.popleft() if self.faults else None
        if fail is not None:
            fail(-1)
        if unknown := body.keys() - _REQUIRED - _TAKEN:
            raise RefusalError(400, f"unknown fields {sorted(unknown)}")
        assert body.keys() >= _REQUIRED, body.keys()
        self._check_model(body["model"])
        if not -(1 << 63) <= body.get("seed", 0) < 1 << 63:
            raise RefusalError(400, "seed is no number of 64 bits with a sign")
        ids, told = body["prompt"], body.get("kv_transfer_params")
        assert ids
        assert all(type(one) is int for one in ids)
        if len(ids) + body["max_tokens"] > self.info["max_tokens"]:
            raise RefusalError(400, f"maximum context length is {self.info['max_tokens']} tokens")
        try:
            plan = parse_plan(told, len(ids))
        except ProtocolError as error:
            raise RefusalError(400, str(error)) from error
        assert plan is None or path == COMPLETIONS
        context, served = self.context(ids, plan, body.get("cache_salt"))
        reason = self._write_tokens(ids, context, body, fail, write)
        end: dict[str, Any] = {"choices": [self._choice([], reason)]}
        if served is not None and (params := self.marker(served.to_dict())) is not None:
            end["kv_transfer_params"] = params
        write(end)
        write({"choices": [], "usage": {"prompt_tokens": len(ids)}})

    def _write_tokens(
        self,
        ids: list[int],
        context: Context,
        body: dict[str, Any],
        fail: Fault | None,
        write: Callable[[Any], None],
    ) -> str:
        """Write tokens as they come; why the answer ended."""
        sampling = _sampling(body)
        # As vLLM, which looks for them in the text alone.
        stop = body.get("stop", ()) if self.sees_stops else ()
        text = Detokenizer(self.model.tokenizer.tokenizer, stop)
        made: list[int] = []
        errors: list[Exception] = []

        def on_token(token: int) -> None:
            try:
                if fail is not None:
                    fail(len(made))
                made.append(token)
                text.push(token)
                choice = self._choice([token], None)
                if "logprobs" in body and len(made) == 1:
                    choice["logprobs"] = {"top_logprobs": [likely]}
                write({"choices": [choice]})
            except Exception as error:  # noqa: BLE001 -- raised again below
                errors.append(error)

        if self.script is not None:
            told = Told(self.model, self.script, [])
            sampling = replace(sampling, extra={**sampling.extra, "logits_processor": [told]})
        split = context.num_tokens
        assembly = self.model.choose_assembly("auto", len(ids) - split)
        cache = partial(self.model.cache_for, context, assembly=assembly)
        logits = self.model.next_logits(torch.tensor([ids[split:]]), cache())
        top = logits.log_softmax(-1).topk(body.get("logprobs", 1))
        likely = {f"token_id:{t}": v for v, t in zip(*(one.tolist() for one in top), strict=True)}
        self.model.generate(
            ids[:split],
            ids[split:],
            sampling,
            cache=cache(),
            on_token=on_token,
            is_cancelled=lambda: bool(errors) or text.stopped,
        )
        if errors:
            raise errors[0]
        has_ended = text.stopped or made[-1] in self.model.end_token_ids
        return "stop" if has_ended else "length"

    @staticmethod
    def _choice(ids: list[int], reason: str | None) -> dict[str, Any]:
        # The text is never the client's: it has the tokens. This separator ends no line.
        return {"index": 0, "text": "not\u2028read", "token_ids": ids, "finish_reason": reason}

    def _check_model(self, name: object) -> None:
        if name not in self.info["models"]:
            raise RefusalError(404, f"The model `{name}` does not exist.")

    # -- how it listens ----------------------------------------------------------------------

    def answer(self, handler: Handler, path: str, body: Any) -> None:
        """Answer one request."""
        if path == "/health":
            handler.send_json(200, {})
            return
        if self.api_key and handler.headers["Authorization"] != f"Bearer {self.api_key}":
            raise RefusalError(401, "Unauthorized")
        namespace = self.namespace(handler.headers[TENANT_HEADER])
        if path == INFO and self.with_connector:
            handler.send_json(200, {**self.info, "namespace": namespace})
        elif path == ENCODE and self.with_connector:
            fail = self.faults.popleft() if self.faults else None
            if fail is not None:
                fail(0)
            handler.send_json(200, self.encode(body, namespace))
        elif path == "/v1/completions" or (path == COMPLETIONS and self.with_connector):
            self.complete(path, body, handler.send_event)
            handler.end_events()
        else:
            raise RefusalError(404, "Not Found")

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Surrounds a request."""
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            yield
        finally:
            with self._lock:
                self.at_once -= 1

    def wait_for_idleness(self) -> None:
        """Until no request is under way."""
        until = time.monotonic() + LONGEST_S
        while self.at_once:
            assert time.monotonic() < until, "a request is still under way"
            time.sleep(0.01)

    @contextmanager
    def listening(self) -> Iterator[str]:
        """The address at which it listens."""
        http = _Http(("127.0.0.1", 0), Handler)
        http.fake = self
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            self.url = f"http://127.0.0.1:{http.server_address[1]}"
            yield self.url
        finally:
            http.shutdown()
            thread.join()
            http.server_close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    fake: FakeServer

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._open: set[Any] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def server_close(self) -> None:
        super().server_close()
        for request in list(self._open):  # connections that clients keep
            self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave; that is no error."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: _Http

    def do_GET(self) -> None:
        self._do(None)

    def do_POST(self) -> None:
        assert self.headers["Content-Type"] == "application/json"
        self._do(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _do(self, body: Any) -> None:
        fake = self.server.fake
        self._streams = False
        fake.requests.append((self.path, body))
        fake.authorizations.append(self.headers["Authorization"])
        with fake.counted():
            try:
                fake.answer(self, self.path, body)
            except RefusalError as error:
                if self._streams:
                    self.send_event(error.body)
                    self.end_events()
                else:
                    self.send_json(error.status, error.body, error.headers)
            except EndError:
                self.wfile.write(b"0\r\n\r\n")
            except HangupError:
                self.close_connection = True
            except OSError:
                fake.left.set()
                self.close_connection = True

    def send_json(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def send_event(self, event: Any) -> None:
        if not self._streams:
            self._streams = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream; charset=utf-8")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._send(": a comment\n\n")
        self._send(f"data: {json.dumps(event, ensure_ascii=False)}\n\n")

    def end_events(self) -> None:
        self._send("data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""


def _sampling(body: dict[str, Any]) -> Sampling:
    given = SimpleNamespace(**dict.fromkeys(_TAKEN) | body)
    extra: dict[str, Any] = {
        name: body[name] for name in ("repetition_penalty", "min_p") if name in body
    }
    if given.min_tokens is not None:
        extra["min_new_tokens"] = given.min_tokens
    sampling = Sampling(
        max_new_tokens=given.max_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        seed=given.seed,
    )
    grammar = parse_grammar(given.response_format, given.structured_outputs)
    return replace(sampling, extra=extra, grammar=grammar)
