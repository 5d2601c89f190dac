"""Scheduler half of the connector, which plans loads into pages and saves from pages.

The scheduler's thread serves all requests, so this module never waits for the network or disk.
"""

from __future__ import annotations

import logging
import secrets
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.request import RequestStatus

from blockattn_rag.errors import ProtocolError
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.keys import block_keys, is_salt, salt
from blockattn_rag.server.plan import BlockPlan, ServedBlocks, parse_plan
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import FIELD
from blockattn_rag.server.vllm.metrics import Counters, Ended, WorkerReport
from blockattn_rag.server.vllm.pages import PageTables

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("blockattn_rag")

UNSAVED = "blockattn_unsaved"
"""Field of ``kv_transfer_params``. In a request: the name of an encoding request. In the answer:
why that request's block could not be stored, or None if no failure was reported."""

GRAMMAR_FAILURE = "grammar_failure"
"""Subfield of ``FIELD`` in an answer: why the grammar failed."""

_ENCODE = "blockattn-encode-"
_MAX_UNSAVED = 1024

_ANSWERED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


def new_encode_name() -> str:
    """Create an unguessable name for an encoding request."""
    return f"{_ENCODE}{uuid.uuid4().hex}"


def encode_name(request_id: str) -> str:
    """Return an encoding request's name: its request id without the suffix that vLLM appends."""
    return request_id[: len(_ENCODE) + 32]


# vLLM logs the orders of a failed step. ``repr`` omits token ids, which could be decoded to text.


@dataclass(frozen=True, slots=True)
class Load:
    """Order to load a request's context blocks into its pages. The first ``computed`` context
    tokens are already in pages, which other requests may share."""

    request_id: str
    plan: BlockPlan
    token_ids: list[int] = field(repr=False)
    pages: PageTables
    computed: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Order to copy an encoding request's keys and values of one step from pages to the CPU.

    Copies are made after each step, because pages outside a sliding window are reused.
    """

    request_id: str
    pages: PageTables
    tokens: range


@dataclass(frozen=True, slots=True)
class Save:
    """Order to save the block at the end of a finished encoding request's prompt."""

    request_id: str
    plan: BlockPlan
    token_ids: list[int] = field(repr=False)


@dataclass(slots=True)
class Orders(KVConnectorMetadata):
    """Orders for the workers in one step.

    Args:
        refused: Ids of requests that must fail. The reasons have already been logged.
        ended: Requests whose load has ended on all ranks, and whether to recompute their tokens.
        is_idle: Whether the model does not run in this step, so that workers may wait for loads.
    """

    loads: list[Load] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    ended: dict[str, bool] = field(default_factory=dict)
    is_idle: bool = False


@dataclass(slots=True)
class _Request:
    """State of a block-mode request. ``plan`` is None if the request is refused."""

    request: Request
    plan: BlockPlan | None
    served: ServedBlocks


class SchedulerSide:
    """Tracks block-mode requests and creates the workers' orders."""

    def __init__(self, config: ServingConfig, profile: ModelProfile, ranks: int = 1) -> None:
        self._config = config
        self._profile = profile
        self._ranks = ranks
        self._ended: dict[str, Ended] = {}
        self._secret = config.tenant_secret
        self._requests: dict[str, _Request] = {}
        self._orders = Orders()
        self._unsaved: OrderedDict[str, str] = OrderedDict()
        self.stats = Counters()

    def add(self, request: Request) -> None:
        """Register a new request if it has a plan, and set its cache salt.

        Keys and values depend on the mode and on the prompt's blocks, so the salt isolates their
        pages in the prefix cache. A refused request fails only when it is scheduled, because vLLM
        expects no error here.
        """
        try:
            plan = parse_plan(
                request.kv_transfer_params,
                request.num_prompt_tokens,
                secret=self._secret,
                namespace=self._config.namespace,
            )
        except ProtocolError:
            # The message is not logged, because it may quote the request.
            self._refuse(request, "its kv_transfer_params are invalid")
            return
        if plan is None:
            if is_salt(request.cache_salt):
                _set_salt(request, None)
            return
        try:
            self._check(request, plan)
        except ProtocolError as error:
            self._refuse(request, str(error))
            return
        all_local = ServedBlocks(len(plan.lengths), 0, plan.context_tokens)  # until `allocated`
        self._requests[request.request_id] = _Request(request, plan, all_local)
        if plan.op == "encode":
            # Compute all tokens, because the cache may lack tokens outside a sliding window.
            request.skip_reading_prefix_cache = True
        # A request whose tokens are recomputed must not share pages.
        recomputes = self._profile.recomputed_tokens(plan) > 0
        own = secrets.token_hex() if recomputes else request.cache_salt
        _set_salt(request, salt(plan, self._profile, own))

    def _refuse(self, request: Request, why: str) -> None:
        logger.warning("Request %s was refused: %s", request.request_id, why)
        self._requests[request.request_id] = _Request(request, None, ServedBlocks(0, 0, 0))
        self.stats.count("refused")
        _set_salt(request, f"ba1-refused-{request.request_id}")
        request.skip_reading_prefix_cache = False  # Otherwise, vLLM would not call `promised`.

    def promised(self, request: Request, computed: int) -> tuple[int, bool]:
        """Return how many tokens to load after the first ``computed``, and if vLLM must wait."""
        known = self._requests.get(request.request_id)
        if known is None:
            return 0, False
        if known.plan is None:
            # Makes vLLM call `allocated`, which fails the request. Nothing is loaded.
            return 1, True
        if known.plan.op == "encode":
            return 0, False
        tokens = max(known.plan.context_tokens - computed, 0)
        return tokens, tokens > 0

    def allocated(self, request: Request, pages: KVCacheBlocks, tokens: int) -> None:
        """Order a load of the last ``tokens`` context tokens into pages. Does nothing if 0."""
        known = self._requests.get(request.request_id)
        if known is None or tokens == 0:
            return
        if known.plan is None:
            self._orders.refused.append(request.request_id)
            return
        computed = known.plan.context_tokens - tokens
        known.served = replace(known.served, loaded_tokens=tokens, local_tokens=computed)
        token_ids, tables = list(request.prompt_token_ids or ()), pages.get_block_ids()
        self._orders.loads.append(Load(request.request_id, known.plan, token_ids, tables, computed))

    def orders(self, step: SchedulerOutput) -> Orders:
        orders, self._orders = self._orders, Orders()
        orders.is_idle = step.total_num_scheduled_tokens == 0
        for request_id in step.preempted_req_ids or ():
            known = self._requests.get(request_id)
            if known and known.plan and self._profile.recomputed_tokens(known.plan):
                # A preempted request must not reuse its pages, which may contain recomputed tokens.
                own = secrets.token_hex()
                _set_salt(known.request, salt(known.plan, self._profile, own))
        for request_id, known in self._requests.items():
            if known.plan is None or known.plan.op != "encode":
                continue
            start = known.request.num_computed_tokens
            end = start + step.num_scheduled_tokens.get(request_id, 0)
            tokens = range(start, min(end, known.request.num_prompt_tokens))
            if tokens and (state := step.kv_connector_block_state) is not None:
                tables = state.resolve_block_ids(request_id)
                orders.copies.append(Copy(request_id, tables, tokens))
        return orders

    def take(self, output: KVConnectorOutput) -> None:
        """Process the workers' reports of ended loads and of blocks that were not stored."""
        if not isinstance(report := output.kv_connector_worker_meta, WorkerReport):
            return
        for request_id, fetch in report.fetches.items():
            if (known := self._requests.get(request_id)) is not None:
                known.served = replace(
                    known.served,
                    fetch_s=fetch.seconds,
                    int8_blocks=fetch.int8_blocks,
                    recomputed=[*fetch.recomputed],
                )
        for request_id, end in report.ended.items():
            total = end.plus(self._ended.pop(request_id, Ended()))
            if total.ranks < self._ranks:
                self._ended[request_id] = total
            else:
                # An aborted request needs no recomputation, but has kept its pages until now.
                is_used = request_id in self._requests and not total.failures
                self._orders.ended[request_id] = is_used
        self._unsaved.update(report.unsaved)
        while len(self._unsaved) > _MAX_UNSAVED:  # The oldest requests ended long ago.
            self._unsaved.popitem(last=False)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Process the end of a request. Returns the answer's ``kv_transfer_params``, if any."""
        known = self._requests.pop(request.request_id, None)
        name = (request.kv_transfer_params or {}).get(UNSAVED)
        if known is None and isinstance(name, str):
            return {UNSAVED: self._unsaved.pop(name, None)}
        if (failure := _grammar_failure(request)) is not None:
            return failure
        if known is None or known.plan is None or request.status not in _ANSWERED:
            return None
        if known.plan.op == "encode":
            token_ids = list(request.prompt_token_ids or ())
            self._orders.saves.append(Save(request.request_id, known.plan, token_ids))
            return None
        self.stats.count("answers")
        self.stats.count("loaded_tokens", known.served.loaded_tokens)
        self.stats.count("local_tokens", known.served.local_tokens)
        self.stats.count("recomputed_tokens", sum(known.served.recomputed))
        return known.served.to_dict()

    def _check(self, request: Request, plan: BlockPlan) -> None:
        token_ids = request.prompt_token_ids
        reason = None
        if token_ids is None or request.prompt_embeds is not None or request.mm_features:
            reason = "the prompt contains inputs other than tokens"
        elif request.skip_reading_prefix_cache:
            reason = "prompt_logprobs, or echo with logprobs, requires a complete prefill"
        elif request.resumable or request.sampling_params is None:
            reason = "the request is not a single prompt with a single answer"
        elif request.lora_request:
            reason = "blocks are computed without LoRA adapters, but the request has one"
        elif plan.op == "encode" and plan.keep[0].is_stored:
            reason = "the server is read_only" if self._config.read_only else None
        elif plan.op == "encode":
            has_room = plan.context_tokens <= self._config.private_tokens(self._profile)
            reason = None if has_room else "the block does not fit in private_memory"
        if reason is not None:
            raise ProtocolError(f"Block mode is not possible for op={plan.op!r}: {reason}")
        if plan.op == "encode":
            # Check that the tokens before the block are the recipe's sink.
            block_keys(token_ids or (), plan, self._profile)


def _set_salt(request: Request, cache_salt: str | None) -> None:
    """Set a request's salt, and update the page hashes that depend on it."""
    request.cache_salt = cache_salt
    request.block_hashes.clear()
    request.update_block_hashes()


def _grammar_failure(request: Request) -> dict[str, Any] | None:
    """Return ``kv_transfer_params`` with the reason of a grammar failure, or None.

    After an error, llguidance's matcher allows only the end of the answer. Without this check, vLLM
    would treat the answer as complete.
    """
    held = request.structured_output_request
    matcher = getattr(held and held.grammar, "ll_matcher", None)
    if matcher is None or not matcher.is_error():
        return None
    return {FIELD: {GRAMMAR_FAILURE: matcher.get_error().partition("\n")[0]}}
