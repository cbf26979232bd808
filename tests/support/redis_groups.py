"""Several real Redis servers that belong together: a cluster, or Sentinel's."""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis
from redis.crc import key_slot

from tests.support.redis_server import RedisServer

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


class ClusterServers(_Group):
    """A cluster of primaries with equal shares of the slots, and replicas if wanted.

    Attributes:
        primaries: in the order of their slots.
        replicas: of the first primaries.
    """

    def __init__(self, primaries: int = 3, replicas: int = 0, extra: Sequence[str] = ()) -> None:
        super().__init__()
        made = [
            self._stack.enter_context(_cluster_node(extra)) for _ in range(primaries + replicas)
        ]
        self.primaries, self.replicas = made[:primaries], made[primaries:]
        for position, node in enumerate(self.primaries):
            first, end = (SLOTS * i // primaries for i in (position, position + 1))
            with node.client() as client:
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", position + 1)
                client.execute_command("CLUSTER ADDSLOTS", *range(first, end))
        for node in made[1:]:
            with node.client() as client:
                client.execute_command("CLUSTER MEET", "127.0.0.1", made[0].port)
        self.await_(lambda: all(_knows(node, len(made)) for node in made))
        for node, primary in zip(self.replicas, self.primaries, strict=False):
            with node.client() as client:
                client.execute_command("CLUSTER REPLICATE", self.node_id(primary))
        self.await_(lambda: all(_ready(node) for node in made))
        self.await_(lambda: all(_linked(node) for node in self.replicas))

    @property
    def url(self) -> str:
        return "redis-cluster://" + ",".join(f"127.0.0.1:{n.port}" for n in self.primaries)

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
        with source.client() as client:
            client.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)

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
    """

    service = "kv"

    def __init__(self, requirepass: str | None = None) -> None:
        super().__init__()
        self.primary = self._stack.enter_context(RedisServer())
        self.replica = self._stack.enter_context(
            RedisServer(extra=["--replicaof", "127.0.0.1", str(self.primary.port)])
        )
        _await(lambda: _linked(self.replica))
        self.sentinel = self._stack.enter_context(_Sentinel(self.primary.port, requirepass))
        self._password = requirepass
        _await(lambda: self._seen()["num-slaves"] == 1)

    @property
    def url(self) -> str:
        return f"redis-sentinel://127.0.0.1:{self.sentinel.port}/{self.service}"

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
    def __init__(self, primary_port: int, requirepass: str | None) -> None:
        self._primary_port = primary_port
        self._sentinel_password = requirepass
        super().__init__(requirepass=requirepass)

    def _arguments(self) -> list[str]:
        lines = [
            f"port {self.port}",
            "bind 127.0.0.1",
            f"dir {self._dir}",
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


def _cluster_node(extra: Sequence[str]) -> RedisServer:
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "800"]
    options += ["--cluster-require-full-coverage", "no", "--repl-ping-replica-period", "1"]
    return RedisServer(port=_port_for_cluster(), extra=[*options, *extra])


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
