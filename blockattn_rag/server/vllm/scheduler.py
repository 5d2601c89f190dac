"""The connector's half in vLLM's scheduler: what each request's pages may be filled with.

Nothing here asks a network: the scheduler's thread serves every request.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from blockattn_rag.errors import ProtocolError
from blockattn_rag.prompts.blocks import may_store
from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.profile import ModelProfile
from blockattn_rag.server.protocol import (
    BlockPlan,
    ServedBlocks,
    block_keys,
    is_salt,
    parse_plan,
    salt,
)
from blockattn_rag.server.vllm import grammars
from blockattn_rag.server.vllm.metrics import Counters, Fetches
from blockattn_rag.server.vllm.orders import UNSAVED, Load, Orders, Save

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("blockattn_rag")

_MOST_UNSAVED = 1024

_ANSWERED = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


@dataclass(slots=True)
class _Asked:
    """A request in block mode.

    Args:
        plan: None if it is refused.
        served: figures so far.
        is_filling: its pages are being filled by the step that runs it, and the prefix cache gives
            them to others already.
    """

    plan: BlockPlan | None
    served: ServedBlocks
    is_filling: bool = False


class SchedulerSide:
    """Plans of requests, their salts, and the orders to the workers.

    Args:
        config: the connector's options.
        profile: of the served model.
    """

    def __init__(self, config: ServingConfig, profile: ModelProfile) -> None:
        self._config = config
        self._profile = profile
        self._secret = config.tenant_secret
        self._asked: dict[str, _Asked] = {}
        self._orders = Orders()
        self._pool: BlockPool | None = None
        self._unsaved: OrderedDict[str, str] = OrderedDict()
        self.stats = Counters()

    def bind(self, pool: BlockPool) -> None:
        """Take the engine's pages, to have those forgotten that could not be filled."""
        self._pool = pool

    def add(self, request: Request) -> None:
        """Learn of a request, and see to it that it shares pages with its like alone.

        Pages of block mode hold other keys and values than those of full mode, and those of one
        cut of a prompt others than those of another. A request that is refused fails when it is
        scheduled: here there is nobody to tell.
        """
        try:
            plan = parse_plan(
                request.kv_transfer_params,
                request.num_prompt_tokens,
                secret=self._secret,
                namespace=self._config.namespace,
            )
        except ProtocolError:
            # Its message may quote what was sent, which is no matter for a log.
            self._refuse(request, "kv_transfer_params that an endpoint of this package refuses")
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
        all_local = ServedBlocks(len(plan.lengths), 0, plan.context_tokens)  # if none is promised
        self._asked[request.request_id] = _Asked(plan, all_local)
        _set_salt(request, salt(plan, self._profile, request.cache_salt))

    def _refuse(self, request: Request, why: str) -> None:
        """Have a request fail when it is scheduled."""
        logger.warning("request %s is refused: %s", request.request_id, why)
        self._asked[request.request_id] = _Asked(None, ServedBlocks(0, 0, 0))
        self.stats.count("refused")
        _set_salt(request, f"ba1-refused-{request.request_id}")
        request.skip_reading_prefix_cache = False  # it would keep it from failing

    def promised(self, request: Request, computed: int) -> tuple[int, bool]:
        """Tokens that will be loaded beyond the ``computed`` ones, and whether others run
        meanwhile."""
        asked = self._asked.get(request.request_id)
        if asked is None:
            return 0, False
        if asked.plan is None:
            return 1, True  # which never come
        if asked.plan.op == "encode":
            return 0, False
        tokens = max(asked.plan.context_tokens - computed, 0)
        return tokens, self._config.load_async and tokens > 0

    def allocated(self, request: Request, pages: KVCacheBlocks, tokens: int) -> None:
        """Pages were found for ``tokens`` tokens to be loaded; 0: for tokens to be computed."""
        asked = self._asked.get(request.request_id)
        if asked is None or tokens == 0:
            return
        if asked.plan is None:
            self._orders.refused.append(request.request_id)
            return
        context = asked.plan.context_tokens
        asked.served = replace(asked.served, loaded_tokens=tokens, local_tokens=context - tokens)
        asked.is_filling = not self._config.load_async
        self._orders.loads.append(
            Load(
                request.request_id,
                asked.plan,
                list(request.prompt_token_ids or ()),
                list(pages.get_block_ids()[0]),
                context - tokens,
                self._config.load_async,
            )
        )

    def orders(self, step: SchedulerOutput) -> Orders:
        """What the workers are to do in this step."""
        orders, self._orders = self._orders, Orders()
        orders.is_idle = step.total_num_scheduled_tokens == 0
        return orders

    def heard(self, output: KVConnectorOutput) -> None:
        """Take the workers' news of loads, and of blocks that they could not store."""
        # vLLM forgets these pages where their request runs. It may have been left, or have made
        # room for others since.
        self._forget(output.invalid_block_ids)
        if isinstance(news := output.kv_connector_worker_meta, Fetches):
            for request_id, fetch in news.of_requests.items():
                if (asked := self._asked.get(request_id)) is not None:
                    asked.is_filling = False
                    asked.served = replace(
                        asked.served, fetch_s=fetch.seconds, int8_blocks=fetch.int8_blocks
                    )
            self._unsaved.update(news.unsaved)
            while len(self._unsaved) > _MOST_UNSAVED:  # nobody waits for them any more
                self._unsaved.popitem(last=False)

    def finished(self, request: Request, pages: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended: whether its pages are still needed, and what its client is told."""
        asked = self._asked.pop(request.request_id, None)
        name = (request.kv_transfer_params or {}).get(UNSAVED)
        if asked is None and isinstance(name, str):
            return False, {UNSAVED: self._unsaved.pop(name, None)}
        is_answered = request.status in _ANSWERED
        if asked is not None and asked.is_filling and not is_answered:
            self._forget(set(pages))  # it was left meanwhile, or what fills them failed
        if (failed := grammars.failure(request)) is not None:
            return False, failed
        if asked is None or asked.plan is None or not is_answered:
            return False, None
        plan = asked.plan
        if plan.op == "encode":
            token_ids = list(request.prompt_token_ids or ())
            self._orders.saves.append(Save(request.request_id, plan, token_ids, list(pages)))
            return True, None
        self.stats.count("answers")
        self.stats.count("loaded_tokens", asked.served.loaded_tokens)
        self.stats.count("local_tokens", asked.served.local_tokens)
        return False, asked.served.to_dict()

    def _forget(self, pages: set[int]) -> None:
        """Have the prefix cache give these pages to nobody any more."""
        if self._pool is not None:
            self._pool.evict_blocks(pages)

    def _check(self, request: Request, plan: BlockPlan) -> None:
        """Refuse what block mode cannot answer as it was asked. Raises ProtocolError."""
        token_ids = request.prompt_token_ids
        reason = None
        if token_ids is None or request.prompt_embeds is not None or request.mm_features:
            reason = "the prompt is not made of tokens alone"
        elif request.skip_reading_prefix_cache:
            reason = "prompt_logprobs, or echo with logprobs, needs the whole prompt computed"
        elif request.resumable or request.sampling_params is None:
            reason = "it is no request for one answer to one prompt"
        elif request.lora_request:
            reason = "blocks are encoded and read without any LoRA adapter"
        elif plan.op == "encode":
            reason = self._why_not_kept(plan)
        if reason is not None:
            raise ProtocolError(f"block mode is not possible for op={plan.op!r}: {reason}")
        if plan.op == "encode":
            block_keys(token_ids or (), plan, self._profile)  # looks at what is before the block

    def _why_not_kept(self, plan: BlockPlan) -> str | None:
        """Why this server does not keep a block that is to be encoded; None if it does."""
        if may_store(plan.keep_at(0)):
            return "the server is read_only" if self._config.read_only else None
        has_room = plan.context_tokens <= self._config.private_tokens(self._profile)
        return None if has_room else "private_memory has no room for it"


def _set_salt(request: Request, cache_salt: str | None) -> None:
    """Give a request another salt, and its pages the names that follow from it."""
    request.cache_salt = cache_salt
    request.block_hashes.clear()
    request.update_block_hashes()
