"""Service behind the block-mode routes: encodes missing blocks, and passes requests to vLLM."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import RetryableRequestError
from vllm.sampling_params import StructuredOutputsParams

from blockattn_rag.errors import MissError, SegmentationError, ServingError, StoreError
from blockattn_rag.model.loading import load_tokenizer
from blockattn_rag.prompts.blocks import BlockPrompt
from blockattn_rag.prompts.recognition import Entries, entries_of, joined, marked_sources
from blockattn_rag.server.config import CONNECTOR, ServingConfig
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import EncodeAnswer, EncodeBody, ServerInfo, marker_key_id
from blockattn_rag.server.vllm.answers import ChatReport, ServedTools, Ticket
from blockattn_rag.server.vllm.bodies import ChatBody, CompletionBody
from blockattn_rag.server.vllm.ensure import BlockEnsurer
from blockattn_rag.server.vllm.metrics import INDEX_FAILURES
from blockattn_rag.server.vllm.openai import Prompts, Recognizer, RequestReader, TokenPrompt
from blockattn_rag.server.vllm.retrying import CURRENT, RetryingClient
from blockattn_rag.store import open_store
from blockattn_rag.store.namespaces import Access
from blockattn_rag.store.passage_index import PassageIndex

if TYPE_CHECKING:
    from fastapi.datastructures import Headers

Answer: TypeAlias = AsyncGenerator[str, None] | dict[str, Any] | ErrorResponse
"""Event stream, complete answer, or vLLM's error."""

logger = logging.getLogger("blockattn_rag")

_MOST_UNWRITTEN = 1 << 16  # Entries per namespace, 36 bytes each.

_UNRECOGNIZED = (MissError, SegmentationError, ServingError, StoreError, RetryableRequestError)
"""Errors after which a prompt is answered without recognition of passages."""


class _Call(NamedTuple):
    """A client's request, parsed by this package (``body``) and by vLLM (``request``). ``create``
    is the method of a vLLM handler that answers it."""

    body: ChatBody | CompletionBody
    make_prompt: Callable[[Recognizer | None], BlockPrompt]
    create: Callable[[Any, Any], Awaitable[Any]]
    request: Any
    raw_request: Any
    tools: ServedTools | None = None


class Service:
    """Implementation of a server's block-mode routes."""

    def __init__(
        self, engine_client: Any, state: Any, config: ServingConfig, profile: ModelProfile
    ) -> None:
        self._config = config
        self._profile = profile
        self.max_tokens: int = engine_client.model_config.max_model_len
        self._requests = RequestReader(
            config,
            profile,
            state.openai_serving_models,
            self.max_tokens,
            engine_client.vllm_config.structured_outputs_config.backend,
        )
        home = open_store(config.store)
        self._ensurer = BlockEnsurer(engine_client, home, config, profile)
        is_indexed = home.sidecar is not None or config.recognize
        self.passages = PassageIndex(home, in_background=True) if is_indexed else None
        self._indexing = None
        if self.passages is not None and not config.read_only:
            self._indexing = IndexWriter(self.passages)
        retrying = RetryingClient(engine_client)
        self._completions = _with_client(state.openai_serving_completion, retrying)
        self._chats = _with_client(state.openai_serving_chat, retrying)
        self._model_config = engine_client.model_config

    @classmethod
    def of(cls, engine_client: Any, state: Any) -> Service:
        """Create a server's service from its connector's options."""
        transfer = engine_client.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            found = "none" if transfer is None else transfer.kv_connector
            raise ServingError(
                f"The blockattn plugin requires the connector {CONNECTOR}, found {found}; set it "
                "in --kv-transfer-config, or remove the plugin from VLLM_PLUGINS"
            )
        config = ServingConfig.parse(transfer.kv_connector_extra_config)
        parallel = engine_client.vllm_config.parallel_config
        is_local = parallel.local_engines_only
        engines = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
        if engines > 1 and config.private_bytes:
            raise ServingError(
                f"This API server has {engines} engines (data parallelism), but a private block is "
                "kept in the memory of only one of them. Start one API server per engine "
                "(--data-parallel-external-lb), or set private_memory '0'"
            )
        model = engine_client.model_config
        profile, _ = config.profile_of(model.model, model.dtype, model.revision)
        return cls(engine_client, state, config, profile)

    def info(self, headers: Headers) -> ServerInfo:
        profile, config = self._profile, self._config
        return ServerInfo(
            fingerprint=profile.fingerprint,
            tokenizer=profile.tokenizer,
            sink=profile.recipe.sink,
            adapter=profile.recipe.adapter,
            promote=profile.recipe.promote,
            recompute=profile.recipe.recompute,
            block_tuned=profile.block_tuned,
            models=self._requests.model_names,
            max_tokens=self.max_tokens,
            namespace=self._requests.namespace(headers),
            read_only=config.read_only,
            has_chat_template=self._prompts.has_chat_template,
            marker_key=marker_key_id(),
        )

    async def encode(self, body: EncodeBody, headers: Headers) -> EncodeAnswer:
        ids = await asyncio.to_thread(lambda: self._prompts.passage_ids(body.texts))
        blocks = self._requests.passages(ids, headers)
        if body.only_look:
            is_stored = await self._ensurer.found(blocks)
            return EncodeAnswer(tuple("found" if stored else "missing" for stored in is_stored))
        encoded = await self._ensurer.ensure(blocks, must_store=True)
        self._index(body.texts, headers)
        return EncodeAnswer(
            tuple("encoded" if block.key in encoded else "found" for block in blocks),
            sum(encoded.values()),
            sum(self._profile.block_bytes(n, self._config.kv_dtype) for n in encoded.values()),
        )

    async def chat(self, body: ChatBody, request: Any, raw_request: Any) -> Answer:
        """Answer a chat, in block mode if it has passages and does not request full mode."""
        tools = None
        if not body.not_text and request.tools:  # In a thread, because grammars may be large.
            tools = await asyncio.to_thread(
                lambda: ServedTools.of(request, self._prompts.tokenizer)
            )
        definitions, variables = self._template_arguments(request)

        def make_prompt(recognize: Recognizer | None) -> BlockPrompt:
            return self._prompts.chat(body, definitions, variables, recognize)

        handler = self._chats
        if tools is not None:
            handler = copy.copy(handler)
            handler.parser_cls = None  # This package parses the answers.
            request.tools, request.tool_choice, request.return_token_ids = None, "none", True
            if tools.has_own_grammar:
                request.response_format = None
                grammar = tools.options["structured_outputs"]
                request.structured_outputs = StructuredOutputsParams(**grammar)
        create = handler.create_chat_completion
        return await self._answer(_Call(body, make_prompt, create, request, raw_request, tools))

    async def complete(self, body: CompletionBody, request: Any, raw_request: Any) -> Answer:
        """Answer a completion request. Like ``chat``, but the client has formatted the prompt."""
        make_prompt = partial(Prompts.completion, body)
        create = self._completions.create_completion
        return await self._answer(_Call(body, make_prompt, create, request, raw_request))

    async def _answer(self, call: _Call) -> Answer:
        """Answer a request, after recognizing passages in its prompt if ``recognize`` is set."""
        body, headers = call.body, call.raw_request.headers

        async def render(recognize: Recognizer | None) -> TokenPrompt | None:
            return await asyncio.to_thread(self._render, call, recognize)

        must_render = body.has_passages or call.tools is not None
        if not self._config.recognize:
            return await self._reported(call, await render(None) if must_render else None)
        prompt = None
        try:
            prompt = await render(self._recognizer(headers))
            answer = await self._reported(call, prompt)
        except _UNRECOGNIZED as error:
            # Recognition must not cause an error for a prompt that can be answered without it.
            recognized = prompt
            prompt = await render(None) if must_render else None
            if recognized is not None and recognized == prompt:
                raise
            answer = await self._reported(call, prompt, str(error))
        if prompt is not None and prompt.lengths:
            self._index(body.passages, headers)
        return answer

    def _render(self, call: _Call, recognize: Recognizer | None) -> TokenPrompt | None:
        """Convert a prompt to token ids. Returns None if vLLM can render it, because it has neither
        passages nor tools that this package must render."""
        prompt = call.make_prompt(recognize)
        if call.tools is not None:
            call.tools.prompt = prompt
        if any(block.is_passage for block in prompt.context):
            return self._prompts.token_ids(prompt, call.body.options.mode)
        return None if call.tools is None else self._prompts.token_ids(prompt, "full")

    async def _reported(self, call: _Call, prompt: TokenPrompt | None, reason: str = "") -> Answer:
        """Answer a request, and add a reuse report. ``prompt`` is None if vLLM renders it."""
        headers, tools, ticket = call.raw_request.headers, call.tools, None
        request = call.request.model_copy()  # Keep the original for a retry.
        if prompt is None or not prompt.lengths:
            self._requests.full_mode(request, prompt, headers)
        else:
            plan, blocks = self._requests.block_mode(request, prompt, headers)
            encoded = await self._ensurer.ensure(blocks)
            again = partial(self._ensurer.ensure, blocks, thorough=True)
            keys = [block.key for block in blocks]
            ticket = Ticket(plan, again, encoded, keys, len(prompt.token_ids))
        CURRENT.set(ticket)
        answer = await call.create(request, call.raw_request)
        report = ChatReport(ticket, self._profile.recipe, reason)
        if isinstance(answer, AsyncGenerator):
            return report.events(answer if tools is None else tools.events(answer))
        if isinstance(answer, ErrorResponse):
            return answer
        data = report.answer(answer)
        if tools is not None:
            tools.answer(data)
        return data

    def _template_arguments(self, request: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Return the tools and template variables that vLLM would render a chat with."""
        chats = self._chats
        is_without = request.tool_choice == "none" and chats.exclude_tools_when_tool_choice_none
        tools = [] if is_without else [tool.model_dump() for tool in request.tools or ()]
        params = request.build_chat_params(chats.chat_template, chats.chat_template_content_format)
        defaults = chats.default_chat_template_kwargs
        return tools, params.with_defaults(defaults).chat_template_kwargs

    def _recognizer(self, headers: Headers) -> Recognizer | None:
        if self.passages is None:
            return None
        access = Access(self._requests.namespace(headers), self._config.read_namespaces)
        in_system = self._config.recognize == "system"
        known = partial(self.passages.split, access=access, in_system=in_system)
        if self._config.recognize != "sources":
            return known
        return lambda spans: known(marked_sources(spans))

    def _index(self, texts: Sequence[str], headers: Headers) -> None:
        """Add passages to the index, including promoted passages, which may not be stored yet."""
        if self._indexing is not None:
            self._indexing.add(entries_of(texts), self._requests.namespace(headers))

    @cached_property
    def _prompts(self) -> Prompts:
        """Prompt renderer. Raises ServingError unless a tokenizer that fits the model is loaded."""
        try:
            model = self._model_config
            tokenizer = load_tokenizer(model.tokenizer, revision=model.tokenizer_revision)
        except (OSError, ValueError) as error:
            raise ServingError(f"The server cannot load its tokenizer: {error}") from error
        if self._chats is not None and self._chats.chat_template is not None:
            tokenizer.chat_template = self._chats.chat_template
        prompts = Prompts(tokenizer, self._profile.recipe.promote)
        if prompts.fingerprint != self._profile.tokenizer:
            raise ServingError(
                f"The server's tokenizer ({prompts.fingerprint[:12]}) does not match the model's "
                f"({self._profile.tokenizer[:12]}); remove --tokenizer"
            )
        return prompts


def _with_client(handler: Any, client: RetryingClient) -> Any:
    """Copy a vLLM handler, and replace the copy's engine client. Returns None for None."""
    if handler is None:
        return None
    own = copy.copy(handler)
    own.engine_client = client
    own.enable_prompt_tokens_details = True  # Adds the field cached_tokens to answers.
    return own


class IndexWriter:
    """Collects index entries, and writes them every ``every_s`` seconds, one file per namespace.

    Answers do not wait for the index. A failed write is logged, and retried with the next write in
    its namespace. Entries still waiting for a write are written when the event loop ends.
    """

    def __init__(self, index: PassageIndex, *, every_s: float = 5.0) -> None:
        self._index = index
        self._every_s = every_s
        self._collected: dict[str, list[Entries]] = {}
        self._unwritten: dict[str, list[Entries]] = {}
        self._task: asyncio.Task[None] | None = None
        self._writing = threading.Lock()

    def add(self, entries: Entries, namespace: str) -> None:
        """Schedule a write of entries. Must be called in the event loop."""
        if len(entries):
            self._collected.setdefault(namespace, []).append(entries)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._write_all())

    async def _write_all(self) -> None:
        try:
            while self._collected:
                collected, self._collected = self._collected, {}
                await asyncio.to_thread(self._write, collected)
                await asyncio.sleep(self._every_s)
        except asyncio.CancelledError:
            self._write({name: [] for name in self._unwritten} | self._collected)
            raise

    def _write(self, collected: dict[str, list[Entries]]) -> None:
        with self._writing:  # The thread of a canceled task continues to run.
            for namespace, parts in collected.items():
                entries = joined([*parts, *self._unwritten.pop(namespace, ())])
                try:
                    self._index.add(entries, namespace)
                except Exception as error:  # Other namespaces must still be written.
                    self._unwritten[namespace] = [entries[:_MOST_UNWRITTEN]]
                    INDEX_FAILURES.inc()
                    if isinstance(error, StoreError):
                        logger.warning("Cannot write the passage index: %s", error)
                    else:
                        logger.exception("Unexpected error while writing the index: %s", error)
