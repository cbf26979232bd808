"""The systems that are compared: one entry each, with what it needs and how it is switched on."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from benchmarks.serving.load import Load

if TYPE_CHECKING:
    from typing_extensions import Self

BLOCK = 32
CHUNK = 64
START_S = 120.0
GB = 1 << 30
TOKEN_BYTES = 4096
"""KV of one token of the tiny model, float32."""
_WRITTEN = r"^lmcache_mp_l1_write\w*_total(?:\{[^}]*\})? (\S+)$"


class NoServer:
    """Nothing runs beside the engine."""

    def __init__(self, load: Load, log: Path) -> None:
        self.connector_config: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stored_bytes(self) -> float:
        """KV bytes taken in so far, beyond those that the engine itself counts."""
        return 0.0


class LMCacheServer:
    """`lmcache server`, whose memory is the host tier of its connector."""

    def __init__(self, load: Load, log: Path) -> None:
        self._load = load
        self._log = log
        self._port, self._http, self._metrics = _free_ports(3)

    def __enter__(self) -> Self:
        command = [str(Path(sys.executable).with_name("lmcache")), "server"]
        options = {
            "host": "127.0.0.1",
            "port": self._port,
            "http-port": self._http,
            "prometheus-port": self._metrics,
            "l1-size-gb": self._load.host_gb,
            "eviction-policy": "LRU",
            "max-workers": 1,
            "chunk-size": CHUNK,
            "supported-transfer-mode": "auto",
        }
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._wait()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def connector_config(self) -> dict[str, Any]:
        return {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._port}

    def stored_bytes(self) -> float:
        text = self._get("metrics").decode()
        chunks = sum(float(value) for value in re.findall(_WRITTEN, text, re.MULTILINE))
        return chunks * CHUNK * TOKEN_BYTES

    def _get(self, page: str) -> bytes:
        url = f"http://127.0.0.1:{self._http}/{page}"
        with urllib.request.urlopen(url, timeout=5) as reply:
            return bytes(reply.read())

    def _wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            if self._healthy():
                return
            time.sleep(0.2)
        raise RuntimeError(f"lmcache server did not start, see {self._log}")

    def _healthy(self) -> bool:
        try:
            self._get("healthcheck")
        except OSError:
            return False
        return True


@dataclass(frozen=True)
class System:
    """One line of the comparison.

    Attributes:
        connector: vLLM's name of it, empty for none.
        settings: its `kv_connector_extra_config` for a load.
        plugins: what `VLLM_PLUGINS` allows.
        ours: wrong outputs of it fail the benchmark.
        salted: it needs one cache salt for each adapter to be right.
        kernels_first: see `serving_child.py`.
        missing: why it cannot run here, empty if it can.
        server: what has to run beside it.
    """

    name: str
    title: str
    connector: str = ""
    settings: Callable[[Load], dict[str, Any]] = lambda _load: {}
    plugins: str = "none"
    ours: bool = False
    salted: bool = False
    kernels_first: bool = False
    missing: Callable[[], str] = lambda: ""
    server: type[NoServer | LMCacheServer] = NoServer
    env: Mapping[str, str] = field(default_factory=dict)

    def engine(
        self, model: Path, load: Load, max_loras: int, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of LLM(); `extra` is what the server beside it wants to be told."""
        args = {**engine_args(model, load, max_loras), "enable_prefix_caching": True}
        if self.connector:
            args["kv_transfer_config"] = {
                "kv_connector": self.connector,
                "kv_role": "kv_both",
                "kv_connector_extra_config": {**self.settings(load), **extra},
            }
        return args

    @property
    def environment(self) -> dict[str, str]:
        return {"VLLM_PLUGINS": self.plugins, **self.env}


def engine_args(model: Path, load: Load, max_loras: int) -> dict[str, Any]:
    """What all systems and the oracle have in common."""
    return {
        "model": str(model),
        "enable_lora": True,
        "max_loras": max_loras,
        "max_cpu_loras": max(max_loras, load.host_adapters),
        "max_lora_rank": 8,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": BLOCK,
        "num_gpu_blocks_override": load.gpu_blocks,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.05,
        "max_model_len": load.max_model_len,
    }


def oracle_args(model: Path, load: Load) -> dict[str, Any]:
    """Plain vLLM that caches nothing and has room for everything."""
    return {
        **engine_args(model, load, load.adapters),
        "max_cpu_loras": load.adapters,
        "enable_prefix_caching": False,
        "num_gpu_blocks_override": 256,
    }


def _ours(name: str, title: str, settings: Mapping[str, Any]) -> System:
    def for_load(load: Load) -> dict[str, Any]:
        return {
            "lmcache.chunk_size": CHUNK,
            "lmcache.max_local_cpu_size": load.host_gb,
            **settings,
        }

    return System(
        name, title, "EloraConnector", for_load, plugins="elora", ours=True, missing=_no_elora
    )


def _no_elora() -> str:
    from importlib.metadata import entry_points

    found = entry_points(group="vllm.general_plugins", name="elora")
    return "" if found else "elora_connector is not installed in this environment"


def _no_lmcache() -> str:
    found = importlib.util.find_spec("lmcache")
    return "" if found else "lmcache is not installed in this environment"


def _no_cuda() -> str:
    import torch

    return "" if torch.cuda.is_available() else "needs a CUDA device"


def _offloading(load: Load) -> dict[str, Any]:
    return {"cpu_bytes_to_use": int(load.host_gb * GB), "block_size": CHUNK}


SYSTEMS = {
    system.name: system
    for system in (
        System("vllm", "vLLM, prefix caching"),
        System(
            "lmcache",
            "LMCache (LMCacheMPConnector)",
            "LMCacheMPConnector",
            salted=True,
            kernels_first=True,
            missing=_no_lmcache,
            server=LMCacheServer,
            env={"LMCACHE_TRACK_USAGE": "false"},
        ),
        System(
            "offloading",
            "vLLM OffloadingConnector",
            "OffloadingConnector",
            _offloading,
            missing=_no_cuda,
        ),
        System(
            "simple-offload",
            "vLLM SimpleCPUOffloadConnector",
            "SimpleCPUOffloadConnector",
            _offloading,
            missing=_no_cuda,
        ),
        _ours("lru", "ours, LRU", {"lmcache.cache_policy": "LRU"}),
        _ours("elora", "ours, ELORA", {"lmcache.cache_policy": "ELORA"}),
        _ours(
            "no-dependency",
            "ours, ELORA without the dependency rule",
            {"lmcache.cache_policy": "ELORA", "elora.dependency_rule": False},
        ),
    )
}
BASELINE = "vllm"


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
