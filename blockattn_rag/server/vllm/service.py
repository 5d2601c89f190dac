"""Requests to the endpoints: check them, ensure their blocks, and pass them to vLLM."""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from blockattn_rag.errors import ProtocolError, ServingError
from blockattn_rag.prompts.blocks import Keep
from blockattn_rag.server.config import CONNECTOR, ServingConfig
from blockattn_rag.server.keys import full_mode_salt
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import (
    TENANT_HEADER,
    BlockPlan,
    EncodeAnswer,
    EncodeBody,
    ServerInfo,
    parse_plan,
)
from blockattn_rag.server.validation import Namespace, parse
from blockattn_rag.server.vllm import grammars
from blockattn_rag.server.vllm.ensure import BlockEnsurer, Encodable, encodables
from blockattn_rag.server.vllm.retrying import CURRENT, RetryingClient, Ticket, with_marker
from blockattn_rag.store import open_store

if TYPE_CHECKING:
    from fastapi.datastructures import Headers

Create = Callable[[Any, Any], Awaitable[Any]]
"""Method of one of vLLM's handlers: an answer to a body and its HTTP request."""

_CHAT_IDS = "prompt_token_ids"
"""Field of ``kv_transfer_params`` with the token ids of a chat."""

_DIALECT = "%llguidance"
"""Prefix of grammars in llguidance's dialect."""

_UNSUPPORTED = {
    "echo": "the prompt is not computed in one piece",
    "prompt_logprobs": "the prompt is not computed in one piece",
    "use_beam_search": "vLLM runs each beam as a request, which would load the blocks again",
    "truncate_prompt_tokens": "the plan covers the complete prompt",
    "prompt_embeds": "blocks are found by their tokens",
    "suffix": "the prompt ends with its final block",
}


class Service:
    """Serves the endpoints of one server.

    Args:
        engine_client: Client of vLLM's engine.
        state: State of vLLM's app, with its handlers.
        config: Options of the connector.
        profile: Profile of the served model.
    """

    def __init__(
        self, engine_client: Any, state: Any, config: ServingConfig, profile: ModelProfile
    ) -> None:
        self._config = config
        self._profile = profile
        self._models = state.openai_serving_models
        self._max_tokens: int = engine_client.model_config.max_model_len
        self._secret = config.tenant_secret
        self._grammars: str = engine_client.vllm_config.structured_outputs_config.backend
        home = open_store(config.store)
        self._ensurer = BlockEnsurer(engine_client, home, config, profile)
        retrying = RetryingClient(engine_client)
        self.completions = _with_client(state.openai_serving_completion, retrying)
        self.chat = _with_client(state.openai_serving_chat, retrying)

    @classmethod
    def of(cls, engine_client: Any, state: Any) -> Service:
        """Make the service of a server from the options of its connector.

        Raises:
            ServingError: The server does not use this package's connector alone; or it has several
                engines, each of which would keep other private blocks.
        """
        transfer = engine_client.vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != CONNECTOR:
            found = "none" if transfer is None else transfer.kv_connector
            raise ServingError(
                f"the plugin blockattn needs the connector {CONNECTOR}, found {found}; set it in "
                "--kv-transfer-config, or remove the plugin from VLLM_PLUGINS"
            )
        config = ServingConfig.parse(transfer.kv_connector_extra_config)
        parallel = engine_client.vllm_config.parallel_config
        is_local = parallel.local_engines_only
        engines = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
        if engines > 1 and config.private_bytes:
            raise ServingError(
                f"this API server has {engines} engines (data parallelism), but a block that may "
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
            block_tuned=profile.block_tuned,
            models=self._names,
            max_tokens=self._max_tokens,
            namespace=self._namespace(headers),
            read_only=config.read_only,
        )

    async def encode(self, body: EncodeBody, headers: Headers) -> EncodeAnswer:
        """Store blocks, or look them up.

        Raises:
            ProtocolError: A block cannot be encoded by this server.
            MissError, ServingError, StoreError: As ``BlockEnsurer.ensure``.
        """
        if body.model is not None and body.model not in self._names:
            raise ProtocolError(
                f"found the model {body.model!r:.200}, expected {' or '.join(self._names)}: "
                "blocks are encoded by the base model, without adapters"
            )
        namespace, opens_prompt = self._namespace(headers), body.opens_prompt
        keep = [body.keep] * len(body.blocks)
        blocks = self._encodables(body.blocks, namespace, opens_prompt=opens_prompt, keep=keep)
        if body.only_look:
            there = await self._ensurer.found(blocks)
            return EncodeAnswer(tuple("found" if one else "missing" for one in there))
        encoded = await self._ensurer.ensure(blocks, must_store=True)
        tokens = {b.key: len(b.block.ids) for b, new in zip(blocks, encoded, strict=True) if new}
        return EncodeAnswer(
            tuple("encoded" if one else "found" for one in encoded),
            sum(self._profile.block_bytes(n, self._config.kv_dtype) for n in tokens.values()),
        )

    async def complete(
        self, create: Create, request: Any, raw_request: Any
    ) -> AsyncGenerator[str, None] | Any:
        """Answer a completion or chat with vLLM's handler, after ensuring all blocks.

        Args:
            create: Method of the handler in ``completions`` or ``chat``.
            request: Body. ``kv_transfer_params`` contain the plan; without them, full mode.

        Raises:
            ProtocolError: Block mode cannot answer the request.
            MissError, ServingError, StoreError: As ``BlockEnsurer.ensure``.
        """
        token_ids, params = _prompt_of(request)
        grammars.prepare_request(request, self._grammars)
        if params is None:
            if self._secret is not None:
                namespace = self._namespace(raw_request.headers)
                request.cache_salt = full_mode_salt(self._secret, namespace, request.cache_salt)
            return await create(request, raw_request)
        plan = parse_plan(params, len(token_ids), namespace=self._namespace(raw_request.headers))
        if plan is None or plan.op != "complete":
            raise ProtocolError(
                "kv_transfer_params must contain blockattn with op='complete'; leave them out for "
                "full mode"
            )
        self._check(request, len(token_ids))
        cut = _cut(token_ids, plan)
        blocks = self._encodables(cut, plan.namespace, opens_prompt=True, keep=plan.keep)
        encoded = await self._ensure(blocks)
        ticket = Ticket(plan, lambda: self._ensure(blocks, thorough=True), encoded)
        request.kv_transfer_params = {
            **({_CHAT_IDS: token_ids} if hasattr(request, "messages") else {}),
            **plan.to_dict(self._secret, self._config.namespace),
        }
        CURRENT.set(ticket)
        answer = await create(request, raw_request)
        return with_marker(answer, ticket) if isinstance(answer, AsyncGenerator) else answer

    async def _ensure(
        self, blocks: Sequence[Encodable], *, thorough: bool = False
    ) -> dict[str, int]:
        """Encode missing blocks. Returns their tokens by key."""
        encoded = await self._ensurer.ensure(blocks, thorough=thorough)
        return {b.key: len(b.block.ids) for b, new in zip(blocks, encoded, strict=True) if new}

    def _encodables(
        self,
        blocks: Sequence[Sequence[int]],
        namespace: str,
        *,
        opens_prompt: bool,
        keep: Sequence[Keep] = (),
    ) -> list[Encodable]:
        if any(not 0 <= id_ < self._profile.vocab_size for one in blocks for id_ in one):
            raise ProtocolError(
                f"a block has invalid token ids, expected 0 to {self._profile.vocab_size - 1}"
            )
        found = encodables(
            blocks,
            namespace,
            self._profile,
            self._config.read_namespaces,
            opens_prompt=opens_prompt,
            keep=keep,
        )
        longest = max(len(one.token_ids) for one in found)
        if longest >= self._max_tokens:
            raise ProtocolError(
                f"a block has {longest} tokens including the sink, expected fewer than the "
                f"server's max_model_len, {self._max_tokens}"
            )
        return found

    @property
    def _names(self) -> tuple[str, ...]:
        """Names of the base model."""
        return tuple(one.name for one in self._models.base_model_paths)

    def _namespace(self, headers: Headers) -> str:
        """Namespace of a request: its tenant's, which the gateway sets, or the server's default.

        Raises:
            ProtocolError: The tenant is invalid, or this server has no tenants.
        """
        tenants = headers.getlist(TENANT_HEADER)
        if not tenants:
            return self._config.namespace
        if self._secret is None:
            raise ProtocolError(
                f"found the header {TENANT_HEADER}, but this server has no tenants; set "
                "tenant_secret_env in the connector's options"
            )
        if len(tenants) > 1 or not tenants[0]:  # a gateway that appended to the client's header
            raise ProtocolError(
                f"found the header {TENANT_HEADER} {len(tenants)} times, expected one name; a "
                "gateway must replace what clients send, and remove it if there is no tenant"
            )
        return parse(Namespace, tenants[0], TENANT_HEADER)

    def _check(self, request: Any, num_prompt_tokens: int) -> None:
        """Raise ProtocolError for a request that block mode cannot answer."""
        for name, why in _UNSUPPORTED.items():
            value = getattr(request, name, None)
            if value is not None and value is not False:
                raise ProtocolError(f"{name} is not possible in block mode: {why}; leave it out")
        if num_prompt_tokens >= self._max_tokens:
            raise ProtocolError(
                f"the prompt has {num_prompt_tokens} tokens, expected fewer than the server's "
                f"max_model_len, {self._max_tokens}"
            )
        held = getattr(request, "structured_outputs", None)
        if held is not None and _DIALECT in (held.grammar or "") and self._grammars != "guidance":
            # The backend "auto" accepts it and fails in the engine.
            raise ProtocolError(
                "a grammar in llguidance's dialect, such as for a required tool call, needs vLLM's "
                f"backend guidance, found {self._grammars}; start the server with "
                """--structured-outputs-config '{"backend": "guidance"}'"""
            )
        model = request.model
        if model in self._models.lora_requests:
            raise ProtocolError(
                f"found the LoRA adapter {model!r} as the model: block mode does not support "
                "adapters, which are not trained to read blocks of the base model"
            )
        if model and model not in self._names:
            raise ProtocolError(
                f"found the model {model!r:.200}, expected one of {', '.join(self._names)}"
            )


def _with_client(handler: Any, client: RetryingClient) -> Any:
    """A copy of one of vLLM's handlers with another engine client; None if there is none."""
    if handler is None:
        return None
    own = copy.copy(handler)
    own.engine_client = client
    return own


def _prompt_of(request: Any) -> tuple[list[int], Mapping[str, Any] | None]:
    """Token ids of a body's prompt, and its other ``kv_transfer_params``; None for full mode.

    Raises:
        ProtocolError: The body asks for block mode, and its prompt is no list of token ids.
    """
    params = request.kv_transfer_params
    if params is None:
        return [], None
    is_chat = hasattr(request, "messages")
    ids = params.get(_CHAT_IDS) if is_chat else request.prompt
    if not isinstance(ids, list) or not ids or any(type(one) is not int for one in ids):
        place = f"kv_transfer_params.{_CHAT_IDS}" if is_chat else "prompt"
        raise ProtocolError(f"block mode expects one prompt as a list of token ids in {place}")
    return ids, {name: params[name] for name in params if not (is_chat and name == _CHAT_IDS)}


def _cut(token_ids: Sequence[int], plan: BlockPlan) -> list[Sequence[int]]:
    """The context blocks of a prompt."""
    cut, start = [], 0
    for length in plan.lengths:
        cut.append(token_ids[start : start + length])
        start += length
    return cut
