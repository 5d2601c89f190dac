"""What the scheduler's half of the connector tells the workers', step by step.

Token ids, which are texts, are not shown: vLLM writes its last step into the log when it fails.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from blockattn_rag.server.protocol import BlockPlan

UNSAVED = "blockattn_unsaved"
"""Field of ``kv_transfer_params``: an encoding request's name, in a request of the API server that
asks whether its block could not be stored; in the answer the reason, or None."""

_ENCODE = "blockattn-encode-"


def new_encode_name() -> str:
    """A name for an encoding request that no client can guess."""
    return f"{_ENCODE}{uuid.uuid4().hex}"


def encode_name(request_id: str) -> str:
    """The name in a request id, to which vLLM adds digits of its own."""
    return request_id[: len(_ENCODE) + 32]


@dataclass(frozen=True, slots=True)
class Load:
    """Fill a request's pages with the keys and values of its context.

    Args:
        token_ids: of the whole prompt.
        pages: the request's, in order; the context starts in the first one.
        computed: tokens of the context that are in the pages already, which others may read.
        is_async: whether other requests run meanwhile.
    """

    request_id: str
    plan: BlockPlan
    token_ids: list[int] = field(repr=False)
    pages: list[int]
    computed: int
    is_async: bool


@dataclass(frozen=True, slots=True)
class Save:
    """Store the block that a finished request computed, the last ones of its tokens.

    Args:
        token_ids: of the whole prompt, the sink's first where it has one.
        pages: which hold their keys and values.
    """

    request_id: str
    plan: BlockPlan
    token_ids: list[int] = field(repr=False)
    pages: list[int]


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Those of one step.

    Args:
        refused: ids of requests that must fail, whose reason was logged.
        is_idle: the model computes nothing in this step, so that there is time to wait.
    """

    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    is_idle: bool = False
