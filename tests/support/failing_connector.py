"""A connector that never lets chosen requests run, and then fails them."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from elora_connector.integration.vllm import compat

PATIENCE = 3
"""Look-ups after which a request is failed."""


class Side:
    """Records adapter RPCs, hands out failed requests."""

    def __init__(self) -> None:
        self.failed: list[tuple[str, str]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.protected: frozenset[int] | None = None

    def before_adapter_rpc(self, kind: str, target: Any) -> frozenset[int] | None:
        self.calls.append(("before", kind, target))
        return self.protected

    def after_adapter_rpc(self, kind: str, target: Any, ok: bool) -> None:
        self.calls.append(("after", kind, target, ok))

    def take_failed_requests(self) -> list[tuple[str, str]]:
        failed, self.failed = self.failed, []
        return failed

    def set_paused(self, paused: bool) -> None:
        self.calls.append(("paused", paused))

    def take_restarts(self) -> list[str]:
        return []


class FailingConnector(KVConnectorBase_V1, SupportsHMA):
    """Fails every request with the adapter named `bad`; caches nothing."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.install()
        self.elora_scheduler_side = Side() if role is KVConnectorRole.SCHEDULER else None
        self._asked: dict[str, int] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        lora = request.lora_request
        if lora is None or lora.lora_name != "bad":
            return 0, False
        asked = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        if asked == PATIENCE and self.elora_scheduler_side is not None:
            message = compat.CLIENT_ERROR + "adapter 'bad': it never works"
            self.elora_scheduler_side.failed.append((request.request_id, message))
        return None, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
