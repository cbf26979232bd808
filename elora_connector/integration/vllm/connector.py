"""The class vLLM knows.  It only delegates: scheduler side and worker side do the work."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from elora_connector.integration.vllm.build import build_scheduler_side, build_worker_side
from elora_connector.integration.vllm.metadata import StepMetadata, WorkerReport
from elora_connector.integration.vllm.metrics import EloraPromMetrics, EloraStats, stats_of
from elora_connector.integration.vllm.scheduler_side import SchedulerSide
from elora_connector.integration.vllm.worker_side import WorkerSide

logger = logging.getLogger("vllm.elora_connector")


class EloraConnector(KVConnectorBase_V1, SupportsHMA):
    """External KV cache that never gives one adapter another adapter's KV.

    vLLM makes one in the scheduler's process and one in every worker.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = build_scheduler_side(vllm_config, kv_cache_config)
        else:
            self._worker = build_worker_side(vllm_config, kv_cache_config)

    @property
    def elora_scheduler_side(self) -> SchedulerSide | None:
        """How `compat` finds us behind vLLM's own objects."""
        return self._scheduler

    @property
    def elora_worker_side(self) -> WorkerSide | None:
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped store is just a future miss."""
        return False

    # ---- scheduler side ---------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._side().bind_pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._side().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._side().match(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._side().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._side().build_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._side().on_report(report)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._side().finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    def has_pending_push_work(self) -> bool:
        return self._side().has_pending_work

    def reset_cache(self) -> bool:
        logger.info("reset_cache: %s", self._side().reset())
        return True

    def take_events(self) -> Iterable[Any]:
        return ()

    # ---- worker side -------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._rank().register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._rank().begin_step(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._rank().load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are ordered before the forward as a whole."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, *args: Any, **kwargs: Any) -> None:
        """Whole blocks are copied after the forward."""

    def wait_for_save(self) -> None:
        self._rank().store()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._rank().end_step() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._rank().take_invalid_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._rank().take_report()

    # ---- both --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> EloraStats | None:
        side = self._scheduler or self._worker
        return None if side is None else stats_of(side.recorder)

    def shutdown(self) -> None:
        side = self._scheduler or self._worker
        if side is not None:
            side.shutdown()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EloraStats:
        return EloraStats(data=data) if data is not None else EloraStats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> EloraPromMetrics:
        return EloraPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _side(self) -> SchedulerSide:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    def _rank(self) -> WorkerSide:
        assert self._worker is not None, "called in the scheduler"
        return self._worker
