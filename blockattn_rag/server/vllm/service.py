"""Service behind the routes: ensures the blocks of requests, and passes them to vLLM."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.exceptions import RetryableRequestError

from blockattn_rag.errors import MissError, SegmentationError, ServingError, StoreError
from blockattn_rag.model.loading import load_tokenizer
from blockattn_rag.prompts.recognition import Entries, entries_of, from_hex
from blockattn_rag.server.config import CONNECTOR, ServingConfig
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import EncodeAnswer, EncodeBody, ServerInfo
from blockattn_rag.server.vllm.chat_report import ChatReport
from blockattn_rag.server.vllm.ensure import BlockEnsurer
from blockattn_rag.server.vllm.indexing import IndexWriter
from blockattn_rag.server.vllm.metrics import INDEX_FAILURES
from blockattn_rag.server.vllm.openai import ChatBody, ChatPrompt, ChatPrompts
from blockattn_rag.server.vllm.requests import Encodable, RequestReader
from blockattn_rag.server.vllm.retrying import CURRENT, RetryingClient, Ticket, with_marker
from blockattn_rag.store import open_store
from blockattn_rag.store.namespaces import Access
from blockattn_rag.store.passage_index import PassageIndex

if TYPE_CHECKING:
    from fastapi.datastructures import Headers

Create = Callable[[Any, Any], Awaitable[Any]]
"""Method of one of vLLM's handlers, which answers a body and its HTTP request."""


_UNRECOGNIZED = (MissError, SegmentationError, ServingError, StoreError, RetryableRequestError)
"""Errors after which a chat is answered without recognition."""


class Service:
    """Implementation of the endpoints of one server.

    Args:
        state: State of vLLM's app, with its handlers.
    """

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
            self._indexing = IndexWriter(self.passages, INDEX_FAILURES.inc)
        retrying = RetryingClient(engine_client)
        self.completions = _with_client(state.openai_serving_completion, retrying)
        self.chat = _with_client(state.openai_serving_chat, retrying)
        self._tokenizer_name: str = engine_client.model_config.tokenizer
        self._openai = copy.copy(self.chat)
        if self._openai is not None:
            self._openai.enable_prompt_tokens_details = True  # the field cached_tokens

    @classmethod
    def of(cls, engine_client: Any, state: Any) -> Service:
        """Create the service of a server from the options of its connector.

        Raises:
            ServingError: This package's connector is not the server's only one; or the server has
                several engines, each of which would keep different private blocks.
        """
        transfer = engine_client.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            found = "none" if transfer is None else transfer.kv_connector
            raise ServingError(
                f"The plugin blockattn needs the connector {CONNECTOR}, found {found}; set it in "
                "--kv-transfer-config, or remove the plugin from VLLM_PLUGINS"
            )
        config = ServingConfig.parse(transfer.kv_connector_extra_config)
        parallel = engine_client.vllm_config.parallel_config
        is_local = parallel.local_engines_only
        engines = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
        if engines > 1 and config.private_bytes:
            raise ServingError(
                f"This API server has {engines} engines (data parallelism), but a block that must "
                "not be stored is in the memory of only one of them. Start an API server for each "
                "engine (--data-parallel-external-lb), or set private_memory '0'"
            )
        return cls(engine_client, state, config, ModelProfile.read(config.profile))

    def info(self, headers: Headers) -> ServerInfo:
        """Describe this server to a tenant. Raises ProtocolError for an invalid tenant."""
        profile, config = self._profile, self._config
        return ServerInfo(
            fingerprint=profile.fingerprint,
            tokenizer=profile.tokenizer,
            sink=profile.sink,
            adapter=profile.adapter,
            promote=profile.promote,
            block_tuned=profile.block_tuned,
            models=self._requests.model_names,
            max_tokens=self.max_tokens,
            namespace=self._requests.namespace(headers),
            read_only=config.read_only,
        )

    async def encode(self, body: EncodeBody, headers: Headers) -> EncodeAnswer:
        """Store blocks, or look them up.

        Raises:
            ProtocolError: A block cannot be encoded by this server.
            MissError, ServingError, StoreError: See ``BlockEnsurer.ensure``.
        """
        blocks = self._requests.read_encode(body, headers)
        if body.only_look:
            there = await self._ensurer.found(blocks)
            return EncodeAnswer(tuple("found" if one else "missing" for one in there))
        encoded = await self._ensure(blocks, must_store=True)
        if body.index and self._indexing is not None:
            self._indexing.add(from_hex(body.index), self._requests.namespace(headers))
        return EncodeAnswer(
            tuple("encoded" if one.key in encoded else "found" for one in blocks),
            sum(self._profile.block_bytes(n, self._config.kv_dtype) for n in encoded.values()),
        )

    async def complete(
        self, create: Create, request: Any, raw_request: Any
    ) -> AsyncGenerator[str, None] | Any:
        """Answer a completion or chat with vLLM's handler, after ensuring all blocks.

        Args:
            create: Method of the handler in ``completions`` or ``chat``.
            request: Body. Its ``kv_transfer_params`` contain the plan. Without them, full mode is
                used.

        Raises:
            ProtocolError: Block mode cannot answer the request.
            MissError, ServingError, StoreError: See ``BlockEnsurer.ensure``.
        """
        prompt = self._requests.read(request, raw_request.headers)
        if prompt is None:
            CURRENT.set(None)
            return await create(request, raw_request)
        encoded = await self._ensure(prompt.blocks)
        again = partial(self._ensure, prompt.blocks, thorough=True)
        ticket = Ticket(prompt.plan, again, encoded)
        CURRENT.set(ticket)
        answer = await create(request, raw_request)
        return with_marker(answer, ticket) if isinstance(answer, AsyncGenerator) else answer

    async def openai_chat(
        self, body: ChatBody, request: Any, raw_request: Any
    ) -> AsyncGenerator[str, None] | dict[str, Any] | ErrorResponse:
        """Answer a chat of an OpenAI client. Chats without passages are vLLM's own, in full mode.

        Args:
            request: The same body as vLLM's object.

        Raises:
            ProtocolError: The prompt cannot be rendered, or block mode cannot answer the request.
            MissError, ServingError, StoreError: See ``BlockEnsurer.ensure``.
        """
        namespace = self._requests.namespace(raw_request.headers)
        if not self._config.recognize:
            prompt = await asyncio.to_thread(self._render, body, request) if body.passages else None
            return await self._reported(request, raw_request, prompt)
        prompt = None
        try:
            prompt = await asyncio.to_thread(self._render, body, request, namespace)
            answer = await self._reported(request, raw_request, prompt)
        except _UNRECOGNIZED as error:
            # Recognition must not refuse a chat that can be answered without it.
            plain = await asyncio.to_thread(self._render, body, request) if body.passages else None
            if prompt is not None and plain == prompt:
                raise
            prompt = plain
            answer = await self._reported(request, raw_request, prompt, str(error))
        is_stored = prompt is not None and prompt.plan is not None
        if is_stored and self._indexing is not None:
            self._indexing.add(await asyncio.to_thread(_index_entries, body), namespace)
        return answer

    async def _reported(
        self, request: Any, raw_request: Any, prompt: ChatPrompt | None, reason: str = ""
    ) -> AsyncGenerator[str, None] | dict[str, Any] | ErrorResponse:
        """Answer a chat, with a report on blocks. ``prompt``: None if vLLM renders it."""
        request.kv_transfer_params = None if prompt is None else prompt.to_params()
        report = ChatReport(prompt, self._profile.recipe, reason)
        answer = await self.complete(self._openai.create_chat_completion, request, raw_request)
        if isinstance(answer, AsyncGenerator):
            return report.events(answer)
        return answer if isinstance(answer, ErrorResponse) else report.answer(answer)

    def _render(
        self, body: ChatBody, request: Any, namespace: str | None = None
    ) -> ChatPrompt | None:
        """Render a chat with the tools and variables that vLLM would use. Slow for long chats, so
        call it in a thread.

        Args:
            namespace: Namespace of the passages to recognize; None for none.

        Returns:
            None if the chat has no passages.
        """
        chat = self._openai
        is_without = request.tool_choice == "none" and chat.exclude_tools_when_tool_choice_none
        tools = [] if is_without else [tool.model_dump() for tool in request.tools or ()]
        params = request.build_chat_params(chat.chat_template, chat.chat_template_content_format)
        variables = params.with_defaults(chat.default_chat_template_kwargs).chat_template_kwargs
        recognize = None
        if namespace is not None and self.passages is not None:
            access = Access(namespace, self._config.read_namespaces)
            in_system = self._config.recognize == "system"
            recognize = partial(self.passages.split, access=access, in_system=in_system)
        prompt = self._chat_prompts.prompt(body, tools, variables, recognize)
        if not any(block.is_passage for block in prompt.context):
            return None
        return self._chat_prompts.render(body, prompt)

    @cached_property
    def _chat_prompts(self) -> ChatPrompts:
        """Renderer of chats. Raises ServingError if the tokenizer is not the profile's."""
        try:
            tokenizer = load_tokenizer(self._tokenizer_name)
        except (OSError, ValueError) as error:
            raise ServingError(f"The server cannot load its tokenizer: {error}") from error
        if self._openai.chat_template is not None:
            tokenizer.chat_template = self._openai.chat_template
        prompts = ChatPrompts(tokenizer, self._profile.promote)
        if prompts.fingerprint != self._profile.tokenizer:
            raise ServingError(
                f"The server's tokenizer ({prompts.fingerprint[:12]}) differs from the profile's "
                f"({self._profile.tokenizer[:12]}); make the profile again from the served model"
            )
        return prompts

    async def _ensure(
        self, blocks: Sequence[Encodable], *, thorough: bool = False, must_store: bool = False
    ) -> dict[str, int]:
        """Encode missing blocks. Returns the tokens of the encoded blocks by key."""
        encoded = await self._ensurer.ensure(blocks, thorough=thorough, must_store=must_store)
        return {one.key: one.tokens for one, new in zip(blocks, encoded, strict=True) if new}


def _index_entries(body: ChatBody) -> Entries:
    """Index entries of the passages that a client sent. Promoted passages are stored later, when
    they are first reused."""
    return entries_of(span.text for span in body.passages if span.origin == "passage")


def _with_client(handler: Any, client: RetryingClient) -> Any:
    """Copy one of vLLM's handlers with another engine client. None if there is no handler."""
    if handler is None:
        return None
    own = copy.copy(handler)
    own.engine_client = client
    return own
