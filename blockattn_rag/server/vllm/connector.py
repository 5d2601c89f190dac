"""KV connector for vLLM: one half runs in the scheduler, and one half in each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from blockattn_rag.server.config import ServingConfig
from blockattn_rag.server.vllm.compatibility import check_engine
from blockattn_rag.server.vllm.metrics import ServingPromMetrics, ServingStats, WorkerReport
from blockattn_rag.server.vllm.pages import KVGroup
from blockattn_rag.server.vllm.scheduler import SchedulerSide
from blockattn_rag.server.vllm.worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class BlockAttentionConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector for Block-Attention in vLLM.

    vLLM treats the context blocks of a prompt as a prefix that is computed elsewhere. The connector
    loads their keys and values into vLLM's pages, rotated to their positions, and vLLM prefills the
    final block as usual. ``kv_connector_extra_config`` contains the options (``ServingConfig``).
    """

    scheduler: SchedulerSide
    """Scheduler half. Set in the scheduler's process only."""
    worker: WorkerSide
    """Worker half. Set in workers only, once their pages are registered."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = ServingConfig.parse(self._kv_transfer_config.kv_connector_extra_config)
        model = vllm_config.model_config
        profile, recipe = config.profile_of(model.model, model.dtype, model.revision)
        check_engine(vllm_config, kv_cache_config, config, profile)
        self._config, self._profile, self._recipe = config, profile, recipe
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(config, profile, vllm_config.parallel_config.world_size)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: saves are best effort, because a lost block is encoded again."""
        return False

    # Scheduler half.

    def on_new_request(self, request: Request) -> None:
        self.scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.promised(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.take(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.finished(request)

    # Worker half.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        engine, groups = self._vllm_config, self._kv_cache_config.kv_cache_groups
        layers = {
            name: (
                engine.compilation_config.static_forward_context[name],
                KVGroup(index, group.kv_cache_spec.block_size),
            )
            for index, group in enumerate(groups)
            for name in group.layer_names
            if name in kv_caches
        }
        self.worker = WorkerSide(self._config, self._profile, self._recipe, engine, layers)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker.execute(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing, because a request runs only after all its layers are loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing, because pages are copied after all layers have run."""

    def wait_for_save(self) -> None:
        """Copy the keys and values that this step computed for encoding requests."""
        self.worker.copy(self._get_connector_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.done(finished_req_ids)

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self.worker.report()

    # Both halves.

    def get_kv_connector_stats(self) -> ServingStats | None:
        is_scheduler = self.role == KVConnectorRole.SCHEDULER
        return self.scheduler.stats.taken() if is_scheduler else self.worker.counted()

    def shutdown(self) -> None:
        if hasattr(self, "worker"):
            self.worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ServingStats:
        return ServingStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> ServingPromMetrics:
        return ServingPromMetrics(*args)
