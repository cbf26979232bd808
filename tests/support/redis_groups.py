"""Several real Redis servers that belong together: a cluster, or Sentinel's."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis
from redis.crc import key_slot

from tests.support.proxy import EitherProxy
from tests.support.redis_server import RedisServer, free_port

if TYPE_CHECKING:
    from typing_extensions import Self

_WAIT_S = 20.0
SLOTS = 16384


class _Group:
    """Servers that start and stop together."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


class Front:
    """What clients meet at each server of a group; this one: the server itself, no TLS.

    Attributes:
        binary: of the servers.
        meets_at_front: whether the servers of a cluster too speak to each other there.
    """

    scheme = "redis"
    binary: str | None = None
    meets_at_front = False

    def before(self, port: int) -> tuple[int, list[str]]:
        """(port for clients, options of the server that has the port `port`)."""
        return port, []


class ProxyFront(Front):
    """A proxy that speaks TLS before each server."""

    scheme = "rediss"

    def __init__(self, context: ssl.SSLContext, stack: contextlib.ExitStack) -> None:
        self._context, self._stack = context, stack

    def before(self, port: int) -> tuple[int, list[str]]:
        port = self._stack.enter_context(EitherProxy(port, self._context)).port
        return port, ["--cluster-announce-port", str(port), "--replica-announce-port", str(port)]


class TlsFront(Front):
    """Servers that speak TLS themselves, to each other too, and ask for certificates."""

    scheme = "rediss"
    meets_at_front = True

    def __init__(self, binary: str, cert: str, key: str) -> None:
        self.binary = binary
        self._options = ["--tls-replication", "yes", "--tls-cluster", "yes"]
        self._options += ["--tls-auth-clients", "yes", "--tls-ca-cert-file", cert]
        self._options += ["--tls-cert-file", cert, "--tls-key-file", key]

    def before(self, port: int) -> tuple[int, list[str]]:
        port = _port_for_cluster()
        return port, ["--tls-port", str(port), *self._options]


class ClusterServers(_Group):
    """A cluster of primaries with equal shares of the slots, and replicas if wanted.

    Attributes:
        ports: where clients find the primaries.
        primaries: in the order of their slots.
        replicas: of the first primaries.
    """

    def __init__(
        self,
        primaries: int = 3,
        replicas: int = 0,
        extra: Sequence[str] = (),
        front: Front | None = None,
    ) -> None:
        super().__init__()
        self._front = front or Front()
        ports, made = [], []
        for _ in range(primaries + replicas):
            own = _port_for_cluster()
            port, options = self._front.before(own)
            ports.append(port)
            node = _cluster_node(own, [*options, *extra], self._front.binary)
            made.append(self._stack.enter_context(node))
        self.primaries, self.replicas = made[:primaries], made[primaries:]
        self.ports = ports[:primaries]
        meeting = ports[0] if self._front.meets_at_front else made[0].port
        for position, node in enumerate(self.primaries):
            first, end = (SLOTS * i // primaries for i in (position, position + 1))
            with node.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", position + 1)
                client.execute_command("CLUSTER ADDSLOTS", *range(first, end))
        for node in made[1:]:
            with node.client() as client:
                client.execute_command("CLUSTER MEET", "127.0.0.1", meeting)
        self.await_(lambda: all(_knows(node, len(made)) for node in made))
        for node, primary in zip(self.replicas, self.primaries, strict=False):
            with node.client() as client:
                client.execute_command("CLUSTER REPLICATE", self.node_id(primary))
        self.await_(lambda: all(_ready(node) for node in made))
        self.await_(lambda: all(_linked(node) for node in self.replicas))

    @property
    def url(self) -> str:
        places = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"{self._front.scheme}-cluster://{places}"

    def client(self) -> redis.RedisCluster:
        """An administrator's connection to all of it."""
        return redis.RedisCluster(host="127.0.0.1", port=self.primaries[0].port)

    def primary_of(self, key: str) -> RedisServer:
        slot = key_slot(key.encode())
        return self.primaries[((slot + 1) * len(self.primaries) - 1) // SLOTS]

    def node_id(self, node: RedisServer) -> str:
        with node.client() as client:
            return _text(client.execute_command("CLUSTER MYID"))

    def begin_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """From now on `source` answers ASK for the keys of the slot that it lacks."""
        with source.client() as one, target.client() as two:
            two.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.node_id(source))
            one.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.node_id(target))

    def move_key(self, key: str, source: RedisServer, target: RedisServer) -> None:
        port = target.port
        if self._front.meets_at_front:
            port = self.ports[self.primaries.index(target)]
        with source.client() as client:
            client.execute_command("MIGRATE", "127.0.0.1", port, key, 0, 5000)

    def end_move(self, slot: int, target: RedisServer) -> None:
        """From now on all others answer MOVED."""
        owner = self.node_id(target)
        for node in (target, *(n for n in self.primaries if n is not target)):
            with node.client() as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", owner)

    @staticmethod
    def await_(condition: Callable[[], bool]) -> None:
        _await(condition)


class SentinelServers(_Group):
    """A primary, a replica and one Sentinel that decides alone.

    Args:
        requirepass: of the Sentinel.

    Attributes:
        primary_port, replica_port: where clients find them.
    """

    service = "kv"

    def __init__(self, requirepass: str | None = None, front: Front | None = None) -> None:
        super().__init__()
        self._front = front = front or Front()
        self.primary, self.primary_port = self._server()
        self.replica, self.replica_port = self._server(
            "--replicaof",
            "127.0.0.1",
            str(self.primary_port if front.meets_at_front else self.primary.port),
        )
        _await(lambda: _linked(self.replica))
        port = free_port()
        self._port, options = front.before(port)
        self.sentinel = self._stack.enter_context(
            _Sentinel(port, self.primary_port, requirepass, options, front.binary)
        )
        self._password = requirepass
        _await(lambda: self._seen()["num-slaves"] == 1)

    def _server(self, *extra: str) -> tuple[RedisServer, int]:
        own = free_port()
        port, options = self._front.before(own)
        server = RedisServer(port=own, binary=self._front.binary, extra=[*extra, *options])
        return self._stack.enter_context(server), port

    @property
    def url(self) -> str:
        return f"{self._front.scheme}-sentinel://127.0.0.1:{self._port}/{self.service}"

    def named(self) -> int:
        """Port of the primary that the Sentinel names."""
        with self.sentinel.client() as client:
            return int(client.sentinel_get_master_addr_by_name(self.service)[1])

    def fail_over(self) -> None:
        """A planned one: the old primary goes on as a replica."""
        _await(self._fails_over)

    def _fails_over(self) -> bool:
        """False while the Sentinel does not know enough of the replica yet."""
        try:
            with self.sentinel.client() as client:
                client.execute_command("SENTINEL FAILOVER", self.service)
        except redis.ResponseError as error:
            if "NOGOODSLAVE" not in str(error):
                raise
            return False
        return True

    def _seen(self) -> Any:
        with self.sentinel.client() as client:
            return client.sentinel_master(self.service)


class _Sentinel(RedisServer):
    def __init__(
        self,
        port: int,
        primary_port: int,
        requirepass: str | None,
        options: Sequence[str],
        binary: str | None,
    ) -> None:
        self._primary_port = primary_port
        self._sentinel_password = requirepass
        self._lines = [
            f"{name[2:]} {value}" for name, value in zip(options[::2], options[1::2], strict=True)
        ]
        super().__init__(requirepass=requirepass, port=port, binary=binary)

    def _arguments(self) -> list[str]:
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._dir}",
            *self._lines,
            f"sentinel monitor {SentinelServers.service} 127.0.0.1 {self._primary_port} 1",
            f"sentinel down-after-milliseconds {SentinelServers.service} 500",
            f"sentinel failover-timeout {SentinelServers.service} 3000",
        ]
        if self._sentinel_password:
            lines.append(f"requirepass {self._sentinel_password}")
        file = Path(self._dir, "sentinel.conf")
        if not file.exists():
            file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [str(file), "--sentinel"]


def _cluster_node(port: int, extra: Sequence[str], binary: str | None) -> RedisServer:
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "800"]
    options += ["--cluster-require-full-coverage", "no", "--repl-ping-replica-period", "1"]
    return RedisServer(port=port, binary=binary, extra=[*options, *extra])


def _port_for_cluster() -> int:
    """Below the ephemeral ports, and with the cluster's bus port (10000 higher) free too."""
    while True:
        port = random.randrange(12_000, 22_000)
        try:
            for number in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port


def _knows(node: RedisServer, count: int) -> bool:
    with node.client() as client:
        nodes = client.execute_command("CLUSTER NODES")
    return len(nodes) == count and all(node["connected"] for node in nodes.values())


def _ready(node: RedisServer) -> bool:
    with node.client() as client:
        return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


def _linked(node: RedisServer) -> bool:
    with node.client() as client:
        return client.info("replication").get("master_link_status") == "up"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _await(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the servers did not come together"
        time.sleep(0.02)
