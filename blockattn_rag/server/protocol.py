"""Protocol between client and server: routes, JSON bodies, and the plan of a prompt.

Completions and chats use vLLM's own bodies. The ``kv_transfer_params`` of a request contain a
``BlockPlan``, those of an answer ``ServedBlocks``. A client sends token ids, the length of each
context block, and where the server may keep each block. It sends no keys or digests: the server
computes keys from the token ids, so a client can reuse only the KV of tokens that it sends.

Importing this module does not load torch.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    StrictBool,
    TypeAdapter,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass

from blockattn_rag.engine.outline import RecipeOutline
from blockattn_rag.errors import ProtocolError
from blockattn_rag.prompts.blocks import PRIVATE, Keep
from blockattn_rag.prompts.recognition import HEX_DIGITS, from_hex
from blockattn_rag.server.validation import (
    STRICT,
    AdapterDigest,
    Count,
    Digest,
    Namespace,
    Positive,
    SinkName,
    as_object,
    check_version,
    parse,
    shown,
)

INFO = "/blockattn/v1/info"
ENCODE = "/blockattn/v1/encode"
COMPLETIONS = "/blockattn/v1/completions"
CHAT_COMPLETIONS = "/blockattn/v1/chat/completions"

OPENAI = "/blockattn/openai/v1"
"""Base URL for clients of OpenAI's API."""

TENANT_HEADER = "x-tenant-id"
"""HTTP header of the tenant. The gateway sets it, and must remove it from client requests."""

VERSION = 1
FIELD = "blockattn"
"""This package's field of ``kv_transfer_params``, in requests and in answers."""

MOST_BLOCKS = 256

_Name = Annotated[str, Field(min_length=1)]
_IndexEntry = Annotated[str, Field(pattern=f"^([0-9a-f]{{{HEX_DIGITS}}})?$")]
_Ids = Annotated[tuple[Count, ...], Field(min_length=1, fail_fast=True)]

Op = Literal["complete", "encode"]
"""``complete``: answer from blocks. ``encode``: compute and keep the KV of one block."""

Outcome = Literal["found", "encoded", "missing"]
"""Outcome for a block: already stored, stored by this request, or not stored."""


@dataclass(config=STRICT, frozen=True, slots=True)
class ServerInfo:
    """Description of a server, from ``INFO``.

    Args:
        fingerprint, tokenizer, sink, adapter, promote, block_tuned: See ``ModelProfile``.
        models: Names of its models, the base model first.
        max_tokens: Maximum tokens of a prompt and its answer together.
        namespace: Namespace of the caller's blocks.
        read_only: Whether the server stores nothing.

    Raises:
        ValueError: A field is invalid.
    """

    fingerprint: Digest
    tokenizer: Digest
    sink: SinkName
    adapter: AdapterDigest
    promote: Count
    block_tuned: StrictBool
    models: Annotated[tuple[_Name, ...], Field(min_length=1, max_length=MOST_BLOCKS)]
    max_tokens: Positive
    namespace: Namespace
    read_only: StrictBool

    @property
    def recipe(self) -> RecipeOutline:
        """Recipe of the server."""
        return RecipeOutline(self.sink, self.adapter, self.promote)

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        return {"v": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, value: object) -> ServerInfo:
        """Parse a JSON object. Raises ProtocolError, also for another protocol version."""
        return parse(cls, check_version(value, "v", VERSION, "info"), "info")


@dataclass(config=STRICT, frozen=True, slots=True)
class EncodeBody:
    """Request to ``ENCODE``: store blocks.

    Args:
        model: One of the server's models; None for the first.
        opens_prompt: Whether the first block opens a prompt, and so is encoded without sink and
            adapter.
        private: Whether to store private blocks, which only private blocks of later prompts reuse
            (``prompts.blocks.Keep``).
        only_look: Whether to encode nothing, and report blocks that are not stored as missing.
        index: Index entry of each block (``prompts.recognition.to_hex``), by which the server
            recognizes its text in plain prompts; empty for a block to leave out. ``()``: none. The
            server cannot verify an entry, as it receives no text. It finds only the exact text that
            an entry describes, so a wrong entry can only change where prompts of the same namespace
            are cut into blocks.

    Raises:
        ValueError: A field is invalid, a block is empty, or a private block has an index entry.
    """

    blocks: Annotated[tuple[_Ids, ...], Field(min_length=1, max_length=MOST_BLOCKS, fail_fast=True)]
    model: _Name | None = None
    opens_prompt: StrictBool = False
    private: StrictBool = False
    only_look: StrictBool = False
    index: Annotated[tuple[_IndexEntry, ...], Field(max_length=MOST_BLOCKS, fail_fast=True)] = ()

    @model_validator(mode="after")
    def _index_agrees(self) -> Self:
        if self.index and (self.private or len(self.index) != len(self.blocks)):
            raise ValueError(
                f"index has {len(self.index)} entries, expected one for each of "
                f"{len(self.blocks)} blocks, which must not be private"
            )
        from_hex(self.index)  # raises ValueError
        return self

    @property
    def keep(self) -> Keep:
        """Where the blocks may be kept."""
        return Keep(self.private, is_stored=True)

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object without fields that have default values."""
        fields: dict[str, Any] = TypeAdapter(EncodeBody).dump_python(
            self, mode="json", exclude_defaults=True
        )
        return fields

    @classmethod
    def from_dict(cls, value: object) -> EncodeBody:
        """Parse a JSON object. Raises ProtocolError."""
        return parse(cls, value, "body")


@dataclass(config=STRICT, frozen=True, slots=True)
class EncodeAnswer:
    """Answer of ``ENCODE``: the outcome for each block, in order.

    ``stored_bytes``: size of the newly encoded blocks in the store.

    Raises:
        ValueError: A field is invalid.
    """

    blocks: Annotated[tuple[Outcome, ...], Field(min_length=1, max_length=MOST_BLOCKS)]
    stored_bytes: Count = 0

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: object) -> EncodeAnswer:
        """Parse a JSON object. Raises ProtocolError."""
        return parse(cls, value, "answer")


@dataclass(config=STRICT, frozen=True, slots=True)
class BlockPlan:
    """How the prompt of a request is split into blocks.

    Args:
        lengths: Number of tokens of each context block, in order. ``complete``: the prompt starts
            with the blocks, and at least one token follows. ``encode``: one block at the end of the
            prompt.
        namespace: Namespace of the blocks, see ``store.namespaces``.
        keep: Where each block may be kept. Default: ``PRIVATE`` for all, so that the KV of text
            that a client did not mark as a passage never reaches the store.
        opens_prompt: For ``encode``: whether the block opens a prompt, and so is encoded without
            sink and adapter.

    Raises:
        ValueError: A field is invalid.
    """

    op: Op
    lengths: Annotated[tuple[Positive, ...], Field(max_length=MOST_BLOCKS, fail_fast=True)]
    namespace: Namespace = ""
    keep: Annotated[
        tuple[Keep, ...], Field(max_length=MOST_BLOCKS, fail_fast=True, validate_default=True)
    ] = ()
    opens_prompt: StrictBool = False

    @field_validator("lengths")
    @classmethod
    def _one_block_to_encode(
        cls, lengths: tuple[int, ...], info: ValidationInfo
    ) -> tuple[int, ...]:
        if info.data.get("op") == "encode" and len(lengths) != 1:
            raise ValueError(
                f"op='encode' takes one block, found {len(lengths)}; send a request for each"
            )
        return lengths

    @field_validator("keep")
    @classmethod
    def _one_keep_per_block(cls, keep: tuple[Keep, ...], info: ValidationInfo) -> tuple[Keep, ...]:
        blocks = len(info.data.get("lengths", keep))
        if len(keep) not in (0, blocks):
            raise ValueError(f"expected one item for each of {blocks} blocks, found {len(keep)}")
        return keep or (PRIVATE,) * blocks

    @property
    def context_tokens(self) -> int:
        """Total tokens of the context blocks."""
        return sum(self.lengths)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raise ProtocolError if the blocks, and for answers one more token, exceed the prompt."""
        most = num_prompt_tokens - (self.op != "encode")
        if self.context_tokens > most:
            raise ProtocolError(
                f"lengths add up to {self.context_tokens} tokens, expected at most {most}: the "
                f"prompt has {num_prompt_tokens}"
                + ", and its last token must not be in a block"
                * (self.op != "encode")
            )

    def to_dict(self, secret: str | None = None, default: str = "") -> dict[str, Any]:
        """``kv_transfer_params`` of a request with this plan.

        Args:
            secret: The server's tenant secret, required to name a namespace.
            default: Namespace of requests without one.

        Raises:
            ValueError: The namespace is not the default one, and there is no secret.
        """
        fields: dict[str, Any] = {"v": VERSION, "op": self.op, "lengths": list(self.lengths)}
        if {*self.keep} != {PRIVATE}:
            fields["keep"] = [[*keep] for keep in self.keep]
        if self.opens_prompt:
            fields["opens_prompt"] = True
        if secret is not None:
            fields |= {"namespace": self.namespace, "mac": self._mac(secret)}
        elif self.namespace != default:
            raise ValueError(
                f"The namespace {self.namespace!r} can be named only with the server's tenant "
                "secret; clients send plans without a namespace"
            )
        return {FIELD: fields}

    def is_signed(self, mac: object, secret: str) -> bool:
        """Whether ``mac`` proves that the writer of this plan has the secret."""
        is_text = isinstance(mac, str) and mac.isascii()
        return is_text and hmac.compare_digest(str(mac), self._mac(secret))

    def _mac(self, secret: str) -> str:
        return code(json.dumps([VERSION, *asdict(self).values()]), secret)


def code(message: str, secret: str) -> str:
    """HMAC-SHA256 as 64 hex digits."""
    return hmac.new(secret.encode(), message.encode(), hashlib.sha256).hexdigest()


def parse_plan(
    kv_transfer_params: Mapping[str, Any] | None,
    num_prompt_tokens: int,
    *,
    secret: str | None = None,
    namespace: str = "",
) -> BlockPlan | None:
    """Parse the plan in a request's ``kv_transfer_params``; None if there is none.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        secret: The server's tenant secret. A request that names a namespace must be signed with
            it (``BlockPlan.to_dict``).
        namespace: Namespace of requests without one.

    Raises:
        ProtocolError: The plan is invalid.
    """
    if kv_transfer_params is None:
        return None
    params = as_object(kv_transfer_params, "kv_transfer_params")
    if FIELD not in params:
        return None
    if others := params.keys() - {FIELD}:
        raise ProtocolError(
            f"kv_transfer_params has the unknown field {shown(min(others))}; remove it"
        )
    fields = check_version(params[FIELD], "v", VERSION, FIELD)
    is_named = "namespace" in fields or "mac" in fields
    mac = fields.pop("mac", None)
    if not is_named:
        fields["namespace"] = namespace
    plan = parse(BlockPlan, fields, FIELD)
    if is_named and (secret is None or not plan.is_signed(mac, secret)):
        raise ProtocolError(
            "A client may not name its namespace: only the server's endpoint may, which signs it "
            "with the secret from the environment variable given by the option tenant_secret_env"
        )
    plan.check_fits(num_prompt_tokens)
    return plan
