"""Routes of block mode, and the bodies for describing a server and encoding blocks.

Completions and chats use vLLM's own bodies, with the ``kv_transfer_params`` of ``protocol``.
Importing this module does not load torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from blockattn_rag.errors import ProtocolError
from blockattn_rag.prompts.blocks import Keep
from blockattn_rag.server.fields import (
    hex_digest,
    namespace_name,
    one_of,
    record,
    sequence,
    shown,
    sink_name,
    text,
    whole,
)
from blockattn_rag.server.protocol import MOST_BLOCKS, VERSION, check_version

INFO = "/blockattn/v1/info"
ENCODE = "/blockattn/v1/encode"
COMPLETIONS = "/blockattn/v1/completions"
CHAT_COMPLETIONS = "/blockattn/v1/chat/completions"

TENANT_HEADER = "x-tenant-id"
"""Header with the tenant. Set by the gateway, which must remove it from client requests."""

Outcome = Literal["found", "encoded", "missing"]
"""Outcome for a block: already stored, stored by this request, or not stored."""

_OUTCOMES: tuple[Outcome, ...] = ("found", "encoded", "missing")
_MOST_TOKENS = 1 << 24
_FLAGS = ("opens_prompt", "private", "only_look")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Description of a server, from ``INFO``.

    Args:
        fingerprint, tokenizer, sink, block_tuned: See ``ModelProfile``.
        models: Names of its models, the base model first.
        max_tokens: Maximum tokens of a prompt and its answer together.
        namespace: Namespace of the caller's blocks.
        read_only: The server stores nothing.

    Raises:
        ProtocolError: A field is invalid.
    """

    fingerprint: str
    tokenizer: str
    sink: str
    block_tuned: bool
    models: tuple[str, ...]
    max_tokens: int
    namespace: str = ""
    read_only: bool = False

    def __post_init__(self) -> None:
        for name in ("fingerprint", "tokenizer"):
            hex_digest(getattr(self, name), name)
        sink_name(self.sink)
        names = sequence(self.models, "models", 1, MOST_BLOCKS)
        object.__setattr__(self, "models", tuple(text(n, "models", ".+", "names") for n in names))
        whole(self.max_tokens, "max_tokens", 1)
        for name in ("block_tuned", "read_only"):
            _flag(getattr(self, name), name)
        namespace_name(self.namespace)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"v": VERSION, **asdict(self), "models": list(self.models)}

    @classmethod
    def from_dict(cls, told: object) -> ServerInfo:
        """Parse a JSON object. Raises ProtocolError, also for another protocol version."""
        if isinstance(told, Mapping):
            check_version(told.get("v"))
        fields = record(told, "a server's info", ("v", *cls.__dataclass_fields__))
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class EncodeBody:
    """Request to ``ENCODE``: store blocks.

    Args:
        blocks: Token ids of each block.
        model: One of the server's models; None for the first.
        opens_prompt: The first block is the first of a prompt, and is encoded without the sink.
        private: Only private blocks find these blocks (``prompts.blocks.Keep``).
        only_look: Encode nothing, and report blocks that are not stored as missing.

    Raises:
        ProtocolError: A field is invalid, or a block is empty.
    """

    blocks: tuple[tuple[int, ...], ...]
    model: str | None = None
    opens_prompt: bool = False
    private: bool = False
    only_look: bool = False

    @property
    def keep(self) -> Keep:
        """Where the blocks may be kept."""
        return "private-store" if self.private else "store"

    def __post_init__(self) -> None:
        blocks = sequence(self.blocks, "blocks", 1, MOST_BLOCKS)
        checked = tuple(_ids(ids, f"blocks[{place}]") for place, ids in enumerate(blocks))
        object.__setattr__(self, "blocks", checked)
        if self.model is not None:
            text(self.model, "model", ".+", "a model's name")
        for name in _FLAGS:
            _flag(getattr(self, name), name)

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object without defaults."""
        named = {} if self.model is None else {"model": self.model}
        flags = {name: True for name in _FLAGS if getattr(self, name)}
        return {**named, "blocks": [list(ids) for ids in self.blocks], **flags}

    @classmethod
    def from_dict(cls, told: object) -> EncodeBody:
        """Parse a JSON object. Raises ProtocolError."""
        return cls(**record(told, "the body", ("blocks",), ("model", *_FLAGS)))


@dataclass(frozen=True, slots=True)
class EncodeAnswer:
    """Answer of ``ENCODE``: the outcome for each block, in order.

    ``stored_bytes``: size of the newly encoded blocks in the store.

    Raises:
        ProtocolError: A field is invalid.
    """

    blocks: tuple[Outcome, ...]
    stored_bytes: int = 0

    def __post_init__(self) -> None:
        outcomes = sequence(self.blocks, "blocks", 1, MOST_BLOCKS)
        for outcome in outcomes:
            one_of(outcome, "blocks", _OUTCOMES)
        object.__setattr__(self, "blocks", tuple(outcomes))
        whole(self.stored_bytes, "stored_bytes")

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"blocks": list(self.blocks), "stored_bytes": self.stored_bytes}

    @classmethod
    def from_dict(cls, told: object) -> EncodeAnswer:
        """Parse a JSON object. Raises ProtocolError."""
        return cls(**record(told, "the answer", ("blocks", "stored_bytes")))


def _flag(value: object, name: str) -> None:
    if type(value) is not bool:
        raise ProtocolError(f"{name} must be true or false, found {shown(value)}")


def _ids(ids: Sequence[int], name: str) -> tuple[int, ...]:
    found = sequence(ids, name, 1, _MOST_TOKENS)
    return tuple(whole(one, name) for one in found)
