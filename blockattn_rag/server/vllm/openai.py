"""Converts OpenAI clients' prompts to token ids and blocks, and prepares requests for vLLM.

The server renders chats with the model's chat template and splits prompts into blocks, both as an
in-process engine does, so that server and engine can share stored blocks.

Importing this module does not load vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blockattn_rag.errors import ProtocolError
from blockattn_rag.output.grammar import KINDS, MOST_CHARACTERS, choice_grammar
from blockattn_rag.output.tool_templates import tool_template
from blockattn_rag.output.tool_use import prompt_spans
from blockattn_rag.prompts.blocks import STORED, Block, BlockPrompt, Keep, keep_of
from blockattn_rag.prompts.chat_template import (
    Spans,
    chat_spans,
    has_chat_template,
    template_variables,
)
from blockattn_rag.prompts.formats import CHAT
from blockattn_rag.prompts.tokenization import BlockTokenizer
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.keys import BlockId, block_keys, full_mode_salt
from blockattn_rag.server.plan import BlockPlan
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import MOST_BLOCKS, TENANT_HEADER
from blockattn_rag.server.validation import Namespace, parse
from blockattn_rag.server.vllm.bodies import ChatBody, CompletionBody

if TYPE_CHECKING:
    from fastapi.datastructures import Headers

_DIALECT = "%llguidance"  # Prefix of grammars in the llguidance dialect.

_UNSUPPORTED = {
    "echo": "it requires a complete prefill",
    "prompt_logprobs": "it requires a complete prefill",
    "use_beam_search": "vLLM runs each beam as a request, which would reload the blocks",
    "truncate_prompt_tokens": "truncation would cut blocks",
    "prompt_embeds": "blocks are looked up by their token ids",
    "suffix": "the prompt must end with its final block",
}

# llguidance follows references recursively: a chain of 20,000 overflows the stack and crashes the
# server, but a chain of 2,000 does not.
_MOST_REFERENCES = 1_000

Recognizer = Callable[[Spans], Spans]
"""Function that separates known passages from the text around them."""


class TokenPrompt(NamedTuple):
    """Token ids of a prompt, and its split as in ``BlockPlan``, which is empty in full mode."""

    token_ids: list[int]
    lengths: tuple[int, ...] = ()
    keep: tuple[Keep, ...] = ()
    fixed: tuple[int, ...] = ()


class Prompts:
    """Splits chats and completions into blocks, and tokenizes them. Thread-safe."""

    def __init__(self, tokenizer: Any, promote: int = 0) -> None:
        self.tokenizer = tokenizer
        self._promote = promote
        self._tokenizer = BlockTokenizer(tokenizer)
        self._variables = template_variables(tokenizer)

    @property
    def fingerprint(self) -> str:
        return self._tokenizer.fingerprint

    @property
    def has_chat_template(self) -> bool:
        return has_chat_template(self.tokenizer)

    def passage_ids(self, texts: Sequence[str]) -> list[list[int]]:
        blocks = (Block(text.strip(), CHAT.template) for text in texts)
        return [self._tokenizer.block_ids(block, first=False) for block in blocks]

    def token_ids(self, prompt: BlockPrompt, mode: Literal["block", "full"]) -> TokenPrompt:
        """Convert a prompt to token ids. Raises ProtocolError if it has too many blocks."""
        context, final = self._tokenizer.with_final_ids(prompt, self._promote)
        ids_of = self._tokenizer.block_ids
        blocks = [(block, ids_of(block, first=place == 0)) for place, block in enumerate(context)]
        blocks = [(block, ids) for block, ids in blocks if ids]
        token_ids = [*chain.from_iterable(ids for _, ids in blocks), *final]
        if len(blocks) > MOST_BLOCKS:
            raise ProtocolError(
                f"The prompt has {len(blocks)} blocks, expected at most {MOST_BLOCKS}; send fewer "
                "passages"
            )
        if mode == "full":
            return TokenPrompt(token_ids)
        lengths = tuple(len(ids) for _, ids in blocks)
        keep = tuple(keep_of(block.origin) for block, _ in blocks)
        fixed = [place for place, (block, _) in enumerate(blocks) if place and not block.is_passage]
        return TokenPrompt(token_ids, lengths, keep, tuple(fixed))

    def chat(
        self,
        body: ChatBody,
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        recognize: Recognizer | None = None,
    ) -> BlockPrompt:
        """Render a chat with the model's chat template, and split it into blocks."""
        if body.not_text:
            raise ProtocolError(
                f"{body.not_text}, but prompts with passages support only text; remove this part "
                "or the passages"
            )
        if not self.has_chat_template:
            raise ProtocolError("The model has no chat template; use completions")
        read = self._variables | {"add_generation_prompt", "continue_final_message"}
        variables = {name: value for name, value in variables.items() if name in read}
        try:
            if not tools:
                spans = prompt_spans(self.tokenizer, body.messages, None, **variables)
            elif (template := tool_template(self.tokenizer)) is not None:
                spans = template.spans(self.tokenizer, body.messages, tools, **variables)
            else:
                spans = chat_spans(self.tokenizer, body.messages, tools=tools, **variables)
        except Exception as error:  # Templates may raise any exception for unexpected messages.
            raise ProtocolError(f"The chat cannot be rendered: {error}") from error
        return BlockPrompt.from_spans(recognize(spans) if recognize else spans, CHAT.template)

    @staticmethod
    def completion(body: CompletionBody, recognize: Recognizer | None = None) -> BlockPrompt:
        spans = body.spans
        return BlockPrompt.from_spans(recognize(spans) if recognize else spans, CHAT.template)


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Computes requests' namespaces, plans and blocks, and prepares requests for vLLM's handlers.

    Args:
        models: vLLM's registry of the served models.
        max_tokens: The server's ``max_model_len``.
        backend: vLLM's backend for structured outputs.
    """

    config: ServingConfig
    profile: ModelProfile
    models: Any
    max_tokens: int
    backend: str

    @property
    def model_names(self) -> tuple[str, ...]:
        return tuple(model.name for model in self.models.base_model_paths)

    def passages(self, texts: Sequence[Sequence[int]], headers: Headers) -> list[BlockId]:
        namespace, blocks = self.namespace(headers), list[BlockId]()
        for ids in texts:
            plan = BlockPlan("encode", (len(ids),), namespace, (STORED,))
            blocks += self._blocks([*self.profile.sink_ids, *ids], plan)
        return blocks

    def full_mode(self, request: Any, prompt: TokenPrompt | None, headers: Headers) -> None:
        """Prepare a full-mode request for vLLM's handlers. ``prompt``: None if vLLM renders it."""
        self._prepare_grammar(request)
        request.kv_transfer_params = None
        if prompt is not None:
            if request.echo:
                raise ProtocolError("echo is not supported with passages or tools; remove it")
            _set_tokens(request, prompt.token_ids, {})
        if (secret := self.config.tenant_secret) is not None:
            namespace = self.namespace(headers)
            request.cache_salt = full_mode_salt(secret, namespace, request.cache_salt)

    def block_mode(
        self, request: Any, prompt: TokenPrompt, headers: Headers
    ) -> tuple[BlockPlan, list[BlockId]]:
        """Prepare a block-mode request for vLLM's handlers. Returns its plan and context blocks."""
        self._prepare_grammar(request)
        self._check(request, len(prompt.token_ids))
        namespace = self.namespace(headers)
        plan = BlockPlan("complete", prompt.lengths, namespace, prompt.keep, fixed=prompt.fixed)
        blocks = self._blocks(prompt.token_ids, plan)
        _set_tokens(request, prompt.token_ids, plan.to_dict(self.config.tenant_secret))
        return plan, blocks

    def namespace(self, headers: Headers) -> str:
        """Return a request's namespace: the tenant set by the gateway, or ``config.namespace``."""
        tenants = headers.getlist(TENANT_HEADER)
        if not tenants:
            return self.config.namespace
        if self.config.tenant_secret is None:
            raise ProtocolError(
                f"The request has the header {TENANT_HEADER}, but this server has no tenants; set "
                "tenant_secret_env in the connector's options"
            )
        if len(tenants) > 1 or not tenants[0]:
            # The gateway may have appended its value to the client's header.
            raise ProtocolError(
                f"The request has {len(tenants)} {TENANT_HEADER} headers, expected one, which "
                "must not be empty; the gateway must replace or remove the client's header"
            )
        return parse(Namespace, tenants[0], TENANT_HEADER)

    def _blocks(self, token_ids: Sequence[int], plan: BlockPlan) -> list[BlockId]:
        blocks = block_keys(token_ids, plan, self.profile, self.config.read_namespaces)
        longest = max((len(block.to_encode(self.profile)[0]) for block in blocks), default=0)
        if longest >= self.max_tokens:
            raise ProtocolError(
                f"A block has {longest} tokens including the sink, expected fewer than the "
                f"server's max_model_len, {self.max_tokens}; shorten or split it"
            )
        return blocks

    def _prepare_grammar(self, request: Any) -> None:
        """Check a request's grammar, and rewrite ``choice`` for the guidance backend. vLLM's own
        grammar for ``choice`` fails with 2,000 or more choices."""
        response_format, grammar = request.response_format, request.structured_outputs
        values = [] if response_format is None else [response_format.model_dump_json()]
        if grammar is not None:
            values += [getattr(grammar, kind) for kind in KINDS]
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value)
            if len(text) > MOST_CHARACTERS:
                raise ProtocolError(
                    f"The answer's grammar has {len(text):,} characters, expected at most "
                    f"{MOST_CHARACTERS:,}. Reduce the number of options: retrieve candidates "
                    "first, or split the request into several steps"
                )
            if (references := text.count('"$ref"')) > _MOST_REFERENCES:
                raise ProtocolError(
                    f"The answer's schema has {references:,} references ($ref), expected at most "
                    f"{_MOST_REFERENCES:,}. Inline short definitions, or split the request into "
                    "several steps"
                )
        is_guidance = self.backend == "guidance"
        if grammar is not None and _DIALECT in (grammar.grammar or "") and not is_guidance:
            # The "auto" backend accepts this dialect, but then fails in the engine.
            raise ProtocolError(
                "A grammar in the llguidance dialect, such as that of a required tool call, needs "
                f"vLLM's guidance backend, found {self.backend}; start the server with "
                """--structured-outputs-config '{"backend": "guidance"}'"""
            )
        if grammar is not None and grammar.choice and is_guidance:
            request.structured_outputs = replace(
                grammar, choice=None, grammar=choice_grammar(grammar.choice)
            )

    def _check(self, request: Any, num_prompt_tokens: int) -> None:
        for name, why in _UNSUPPORTED.items():
            value = getattr(request, name, None)
            if value is not None and value is not False:
                raise ProtocolError(f"{name} is not supported in block mode: {why}; remove it")
        if num_prompt_tokens >= self.max_tokens:
            raise ProtocolError(
                f"The prompt has {num_prompt_tokens} tokens, expected at most "
                f"{self.max_tokens - 1} (max_model_len minus one token): send fewer passages"
            )
        model = request.model
        if model in self.models.lora_requests:
            raise ProtocolError(
                f"The requested model {model!r} is a LoRA adapter, which block mode does not "
                "support, because it is not trained on the base model's blocks; use the base model"
            )
        if model and model not in self.model_names:
            raise ProtocolError(
                f"Unknown model {model!r:.200}: expected one of {', '.join(self.model_names)}"
            )


def _set_tokens(request: Any, token_ids: list[int], params: dict[str, Any]) -> None:
    if hasattr(request, "messages"):
        request.kv_transfer_params = {"prompt_token_ids": token_ids, **params}
    else:
        request.prompt, request.kv_transfer_params = token_ids, params or None
