"""A store as an administrator sees it: one redis-py client per primary.

Nothing here may stop the server for others: keys are found by SCAN, facts of many keys
are asked for in one pipeline, and values are removed by UNLINK.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, parse_url
from redis.exceptions import MovedError, RedisError
from redis.retry import Retry

from elora_connector.cli.output import UsageError
from elora_connector.config import EloraConfig
from elora_connector.tiers.redis_failure import StoreError, explain
from elora_connector.tiers.redis_pool import Endpoint
from elora_connector.tiers.redis_primaries import check_url, primary_urls
from elora_connector.tiers.redis_url import redact_url

if TYPE_CHECKING:
    from typing_extensions import Self

_SCAN_COUNT = 1000
_BATCH = 500
_PREFIX = b"elora:"
_GREETING = b"elora:probe"

Command = tuple[str | bytes | int, ...]


def check_address(config: EloraConfig) -> None:
    """Raise ConfigError if the store's address or certificates cannot be used; no I/O."""
    if config.remote_url is not None:
        check_url(config.remote_url, *_login(config))


def _login(config: EloraConfig) -> tuple[str | None, ...]:
    remote = config.remote
    return (
        remote.username,
        remote.password,
        remote.ca_file,
        remote.cert_file,
        remote.key_file,
    )


def require_url(config: EloraConfig) -> str:
    """The store's URL.  Raises UsageError where none is configured."""
    if config.remote_url is None:
        raise UsageError("no store: give --url, or a configuration with remote_url")
    return config.remote_url


class Shard:
    """One primary: the keys that it holds and the commands that an operator needs."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def greet(self) -> None:
        """One round trip.  Raises RedisError where there is no usable answer."""
        try:
            # What every look-up does; an ACL may forbid PING.
            self._client.execute_command("EXISTS", _GREETING)
        except MovedError:
            return  # another primary's slot, so this one is well

    def size(self) -> int:
        """Keys of the whole database, ours and others."""
        return int(self._client.dbsize())

    def call(self, *command: str | bytes | int) -> Any:
        """One command.  Raises what redis-py raises."""
        return self._client.execute_command(*command)

    def ask(self, commands: Sequence[Command]) -> list[Any]:
        """Replies in order, an error reply as an exception object in its place."""
        replies: list[Any] = []
        for start in range(0, len(commands), _BATCH):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands[start : start + _BATCH]:
                pipeline.execute_command(*command)
            replies += pipeline.execute(raise_on_error=False)
        return replies

    def scan(self, pattern: str) -> Iterator[list[bytes]]:
        """Keys that match, in the portions the server gives; a key may come twice."""
        cursor = 0
        while True:
            cursor, keys = self._client.scan(cursor, match=pattern, count=_SCAN_COUNT)
            yield [key for key in keys if key.startswith(_PREFIX)]
            if cursor == 0:
                return

    def unlink(self, keys: Sequence[bytes]) -> int:
        """Remove keys without making the server wait; how many there were.

        One key a command: in a cluster, keys of one node may still be in several slots.
        """
        replies = self.ask([("UNLINK", key) for key in keys])
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return sum(replies)

    def close(self) -> None:
        self._client.close()


class Store:
    """All primaries behind one URL.

    Raises:
        ConfigError: the address cannot be used.
        UsageError: there is none.
        StoreError: the store cannot be reached.
    """

    def __init__(self, config: EloraConfig) -> None:
        self.label = redact_url(require_url(config))
        try:
            self.shards = [Shard(client) for client in _clients(config)]
            for shard in self.shards:
                shard.greet()
        except (RedisError, StoreError) as error:
            # redis-py's own text may quote a login.
            failure = explain(error)
            text = f"{self.label}: {failure}"
            raise StoreError(failure.reason, text, down=failure.down) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for shard in self.shards:
            shard.close()

    def has(self, key: bytes) -> bool:
        """Does any primary hold this key?"""
        return any(shard.ask([("EXISTS", key)]) == [1] for shard in self.shards)

    def remove_everywhere(self, keys: Sequence[bytes]) -> None:
        """Remove keys from whichever primary has them, as far as this user may."""
        for shard in self.shards:
            shard.ask([("UNLINK", key) for key in keys])

    def size(self) -> int:
        """Keys of all primaries, ours and others."""
        return sum(shard.size() for shard in self.shards)


def _clients(config: EloraConfig) -> list[Any]:
    """A client of every primary.  A first connection as the tiers make it says best
    what is wrong."""
    timeout_s = config.remote.connect_timeout_ms / 1000
    urls = primary_urls(require_url(config), *_login(config), timeout_s=timeout_s)
    for url in urls:
        Endpoint(url, *_login(config)).dial(time.monotonic() + timeout_s).close()
    return [_client(url, config) for url in urls]


def _client(url: str, config: EloraConfig) -> Any:
    kwargs: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
    kind = kwargs.pop("connection_class", Connection)
    if kind is SSLConnection:
        kwargs.setdefault("ssl_check_hostname", True)
    names = ("username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    given = zip(names, _login(config), strict=True)
    # As in the tiers, settings beat what the URL says.
    kwargs |= {name: value for name, value in given if value is not None}
    kwargs |= {
        "socket_connect_timeout": config.remote.connect_timeout_ms / 1000,
        "socket_timeout": config.remote.operation_timeout_ms / 1000,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    return redis.Redis.from_pool(ConnectionPool(connection_class=kind, **kwargs))
