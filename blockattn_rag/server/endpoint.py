"""The routes by which a server is asked for blocks, and what is said there.

Answers are asked for by the engine's own bodies, with ``kv_transfer_params`` of ``protocol``. What
is ours alone is here: what a server tells of itself, and the encoding of blocks.

Importing this loads no torch.
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
"""Names the tenant; set by the gateway before the server, and never by clients."""

Outcome = Literal["found", "encoded", "missing"]
"""What became of a block: it was stored already, it is stored now, it is not stored."""

_OUTCOMES: tuple[Outcome, ...] = ("found", "encoded", "missing")
_MOST_TOKENS = 1 << 24
_FLAGS = ("opens_prompt", "private", "only_look")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server tells of itself to whoever asks at ``INFO``.

    Args:
        fingerprint, tokenizer, sink, block_tuned: see ``ModelProfile``.
        models: names by which it can be asked, the base model's first.
        max_tokens: longest prompt and answer together.
        namespace: where it stores and looks for the blocks of whoever asks.
        read_only: it encodes nothing.

    Raises:
        ProtocolError: a field is not as it should be.
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
        """As JSON has it."""
        return {"v": VERSION, **asdict(self), "models": list(self.models)}

    @classmethod
    def from_dict(cls, told: object) -> ServerInfo:
        """What ``to_dict`` told of. Raises ProtocolError, also for another version."""
        if isinstance(told, Mapping):
            check_version(told.get("v"))
        fields = record(told, "a server's info", ("v", *cls.__dataclass_fields__))
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class EncodeBody:
    """What is asked at ``ENCODE``: that these blocks be stored.

    Args:
        blocks: token ids of each.
        model: one of the server's models; None: its first.
        opens_prompt: the first block opens a prompt, and so is encoded after no sink.
        private: the blocks are found by private blocks alone (``prompts.blocks.Keep``).
        only_look: encode nothing, and say of what is not stored that it is missing.

    Raises:
        ProtocolError: no block, too many, one of no token; or a field of another type.
    """

    blocks: tuple[tuple[int, ...], ...]
    model: str | None = None
    opens_prompt: bool = False
    private: bool = False
    only_look: bool = False

    @property
    def keep(self) -> Keep:
        """What may become of the blocks: they are encoded to be stored."""
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
        """As JSON has it; what is not given is left out."""
        named = {} if self.model is None else {"model": self.model}
        flags = {name: True for name in _FLAGS if getattr(self, name)}
        return {**named, "blocks": [list(ids) for ids in self.blocks], **flags}

    @classmethod
    def from_dict(cls, told: object) -> EncodeBody:
        """What ``to_dict`` told of. Raises ProtocolError."""
        return cls(**record(told, "the body", ("blocks",), ("model", *_FLAGS)))


@dataclass(frozen=True, slots=True)
class EncodeAnswer:
    """What became of blocks, in the order in which they were sent.

    ``stored_bytes``: of the keys and values of those that were encoded, together, as they are
    stored.

    Raises:
        ProtocolError: a field is not as it should be.
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
        """As JSON has it."""
        return {"blocks": list(self.blocks), "stored_bytes": self.stored_bytes}

    @classmethod
    def from_dict(cls, told: object) -> EncodeAnswer:
        """What ``to_dict`` told of. Raises ProtocolError."""
        return cls(**record(told, "the answer", ("blocks", "stored_bytes")))


def _flag(value: object, name: str) -> None:
    if type(value) is not bool:
        raise ProtocolError(f"{name} must be true or false, found {shown(value)}")


def _ids(ids: Sequence[int], name: str) -> tuple[int, ...]:
    found = sequence(ids, name, 1, _MOST_TOKENS)
    return tuple(whole(one, name) for one in found)
