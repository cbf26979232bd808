"""The resolved configuration: frozen values that know where they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from elora_connector.config.settings import OWN, SETTINGS

GB = 1024**3
MB = 1024**2


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteConfig:
    """Settings of the remote tier (`elora.remote.*`); meanings in `settings.py`.

    `password` is the effective one, whichever way it was given; `mac_key` is the
    content of the variable that `mac_key_env` names.
    """

    ttl_s: int | None
    io_threads: int
    connect_timeout_ms: float
    operation_timeout_ms: float
    lookup_timeout_ms: float
    write_queue_mb: int
    checksum: bool
    mac_key_env: str | None
    mac_key: bytes | None = field(default=None, repr=False)
    fail_open: bool
    username: str | None
    password: str | None = field(repr=False)
    password_env: str | None
    ca_file: str | None
    cert_file: str | None
    key_file: str | None
    max_value_mb: int

    @property
    def write_queue_bytes(self) -> int:
        return self.write_queue_mb * MB

    @property
    def max_value_bytes(self) -> int:
        return self.max_value_mb * MB


@dataclass(frozen=True, kw_only=True, slots=True)
class CostModelConfig:
    """Settings of the cost model (`elora.cost_model.*`); meanings in `settings.py`."""

    lora_term: bool
    cost_term: bool
    visit_term: bool
    recency_term: bool
    tau_s: float
    visit_half_life_s: float | None
    visit_turnovers: float | None
    visit_prior: float
    swap_out: str

    @property
    def visit_decay_s(self) -> float:
        """Time constant of the decayed visits, in seconds."""
        half_life = self.visit_half_life_s
        return math.inf if half_life is None else half_life / math.log(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOrRecomputeConfig:
    """Settings of the test by the same name (`elora.load_or_recompute.*`)."""

    enabled: bool
    margin: float


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class EloraConfig:
    """Every setting, checked; meanings and units in `settings.py`.

    Made by `load_config`; tests vary one with `dataclasses.replace`.
    """

    chunk_size: int
    local_cpu: bool
    max_local_cpu_size: float
    remote_url: str | None
    remote_serde: str | None
    save_decode_cache: bool
    save_unfull_chunk: bool
    min_retrieve_tokens: int
    blocking_timeout_secs: float
    cache_policy: str
    pre_caching_hash_algorithm: str
    extra_config: Mapping[str, Any] = field(hash=False)
    sync_load_ms: float
    shutdown_flush_s: float
    residency: str
    adapter_deadline_s: float
    adapter_prefetch: bool
    fetch_deadline_ms: float
    model_id: str | None
    reset_remote: str
    pin_share: float
    store_block_share: float
    prefetch: bool
    gpu_share: float
    check_invariants: bool
    engines: int
    store: bool
    retrieve: bool
    dependency_rule: bool
    remote: RemoteConfig
    cost_model: CostModelConfig
    load_or_recompute: LoadOrRecomputeConfig
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Origin of every setting that is not a default, by key."""
    warnings: tuple[str, ...] = field(default=(), compare=False)
    """What the user should be told; the caller logs each once."""

    @property
    def host_bytes(self) -> int:
        """Host memory of one worker rank, in bytes."""
        return int(self.max_local_cpu_size * GB)

    def origin(self, key: str) -> str:
        """Where a setting came from: "default", "file PATH", "env NAME" or
        "kv_connector_extra_config".  `remote.ttl_s` and `elora.remote.ttl_s` both work.

        Raises:
            KeyError: there is no such setting.
        """
        full = key if key in SETTINGS else OWN + key
        return self.origins.get(SETTINGS[full].key, "default")

    def _shown(self) -> dict[str, str]:
        return {key: s.show(attrgetter(s.path)(self)) for key, s in SETTINGS.items()}

    def describe(self) -> str:
        """All values with unit and origin, one a line, without secrets."""
        lines = ["elora_connector configuration:"]
        for key, value in self._shown().items():
            unit = SETTINGS[key].unit.split(" ")[0]
            text = f"{value} {unit}" if unit and value != "null" else value
            lines.append(f"  {key} = {text}  [{self.origin(key)}]")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return "EloraConfig(" + ", ".join(f"{k}={v}" for k, v in self._shown().items()) + ")"
