"""Where a Redis is, and a bounded set of links to it."""

from __future__ import annotations

import os
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, parse_url
from redis.exceptions import RedisError, ResponseError
from redis.retry import Retry

from elora_connector.errors import ConfigError
from elora_connector.tiers.redis_dial import PlainConnection, anonymous, kind_of, link_of
from elora_connector.tiers.redis_failure import (
    LinkClosedError,
    ReplyError,
    StoreError,
    explain,
)
from elora_connector.tiers.redis_link import Link, pack
from elora_connector.tiers.redis_url import as_redis, redact_url

_OPTIONS = {"host", "port", "path", "db", "username", "password", "connection_class"}
_CLOSED_EARLY = (
    "the server closed the connection before its first answer; "
    "a server that expects TLS does this (rediss://)"
)


class Dialler(Protocol):
    """Knows where to connect to.

    Attributes:
        label: the place without secrets, for logs.
    """

    @property
    def label(self) -> str: ...

    def dial(self, deadline: float) -> Link:
        """A connected, logged-in link; see `Endpoint.dial`."""
        ...

    def led_astray(self, failure: StoreError) -> bool:
        """Whether the failure says that another server must be dialled from now on."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Address and login.  Arguments beat what the URL says.

    Raises:
        ConfigError: the URL, an option in it or a certificate file cannot be used.
    """

    url: str = field(repr=False)
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    ssl_ca: str | None = None
    ssl_cert: str | None = None
    ssl_key: str | None = None

    def __post_init__(self) -> None:
        kwargs = self._parsed()
        self._check_place(kwargs)
        self._check_files(secure=kwargs.get("connection_class") is SSLConnection)
        try:
            self._connection(1.0)
        except (RedisError, TypeError, ValueError):
            raise ConfigError(f"remote_url {self.label}: an ssl_ option is unknown") from None

    @property
    def label(self) -> str:
        return redact_url(self.url)

    def dial(self, deadline: float) -> Link:
        """A connected, logged-in link; the caller owns it.

        Raises:
            StoreError: there is none by `deadline` (`time.monotonic` seconds), name
                resolution aside, which the system does not let us bound.
        """
        connection = self._connection(max(0.001, deadline - time.monotonic()))
        try:
            connection.connect()
            link = link_of(connection)
            link.expire_at(deadline)
            _introduce(link, self._parsed().get("db", 0))
        except Exception as error:  # noqa: BLE001 - redis-py's own text may quote the login
            connection.disconnect()
            failure = explain(error)
            if isinstance(failure, LinkClosedError) and isinstance(connection, PlainConnection):
                failure = LinkClosedError(_CLOSED_EARLY)
            raise failure from None
        return link

    def ask(self, deadline: float, *command: str) -> Any:
        """One command on a connection of its own; redis-py's form of the reply.

        Raises:
            StoreError: as from `dial`, or the server refuses the command.
        """
        link = self.dial(deadline)
        try:
            link.opened_by.send_command(*command)
            return link.opened_by.read_response()
        except ResponseError as error:
            if type(error) is not ResponseError:
                raise explain(error) from None
            raise explain(ReplyError(f"ERR {error}")) from None  # redis-py took the word off
        except (StoreError, OSError, RedisError) as error:
            raise explain(error) from None
        finally:
            link.close()

    def led_astray(self, failure: StoreError) -> bool:
        """Never: there is only this one server."""
        return False

    def _connection(self, timeout_s: float) -> Any:
        """A redis-py connection, not connected; it leaves the database to `_introduce`."""
        kwargs = self._parsed()
        kwargs.pop("db", None)
        kind = kwargs.pop("connection_class", Connection)
        kwargs.update({k: v for k, v in self._login().items() if v is not None})
        if kind is SSLConnection:
            kwargs.setdefault("ssl_check_hostname", True)
            kwargs.update({k: v for k, v in self._files().items() if v is not None})
        return kind_of(kind)(
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            **anonymous(),
            **kwargs,
        )

    def _login(self) -> dict[str, str | None]:
        return {"username": self.username, "password": self.password}

    def _files(self) -> dict[str, str | None]:
        return {
            "ssl_ca_certs": self.ssl_ca,
            "ssl_certfile": self.ssl_cert,
            "ssl_keyfile": self.ssl_key,
        }

    def _parsed(self) -> dict[str, Any]:
        try:
            kwargs: dict[str, Any] = parse_url(as_redis(self.url))  # type: ignore[no-untyped-call]
        except ValueError:
            # The parser's own message may quote a piece of the password.
            raise ConfigError(
                f"remote_url {self.label} is not usable: expected "
                "redis://, rediss:// or unix://, as in redis://[user:password@]host:port/db; "
                "percent-encode special characters in the password"
            ) from None
        return kwargs

    def _check_place(self, kwargs: dict[str, Any]) -> None:
        if self.label.endswith("://***"):
            # redis-py silently takes database 0 for a path that is no number.
            raise ConfigError(f"remote_url {self.label}: host, port or database is malformed")
        for option in kwargs:
            if option not in _OPTIONS and not option.startswith("ssl_"):
                raise ConfigError(f"remote_url {self.label}: option {option!r} is not accepted")

    def _check_files(self, *, secure: bool) -> None:
        for name, path in self._files().items():
            if path is not None and not secure:
                raise ConfigError(f"{name} is set, but {self.label} is not a rediss:// URL")
            if path is not None and not os.path.isfile(path):
                raise ConfigError(f"{name}: {path} is not a file")
        if self.ssl_ca is None:
            return
        try:
            ssl.create_default_context(cafile=self.ssl_ca)
        except ssl.SSLError:
            raise ConfigError(f"ssl_ca_certs: {self.ssl_ca} holds no PEM certificate") from None


def _introduce(link: Link, database: int) -> None:
    """Select the database and give the connection a name, in one round trip."""
    commands = [pack("CLIENT", "SETNAME", "elora")]
    if database:
        commands.append(pack("SELECT", database))
    link.send(commands, len(commands))
    try:
        link.reply()
    except ReplyError as error:
        # The name is a courtesy to operators: an ACL may forbid it, an old proxy not know it.
        if not str(error).startswith(("NOPERM", "ERR unknown", "ERR Unknown")):
            raise
    link.replies(len(commands) - 1)


def _until(deadline: float | None, timeout_s: float) -> float:
    return time.monotonic() + timeout_s if deadline is None else deadline


class LinkPool:
    """At most `size` links; the one used last is taken first.

    Any thread may take one; `close` wakes threads that wait on theirs.
    """

    def __init__(
        self, endpoint: Dialler, size: int, connect_timeout_s: float, operation_timeout_s: float
    ) -> None:
        self._endpoint = endpoint
        self._connect_timeout_s = connect_timeout_s
        self._operation_timeout_s = operation_timeout_s
        self._places = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[Link] = []
        self._busy: set[Link] = set()
        self._closed = False

    @contextmanager
    def link(self, deadline: float | None = None) -> Iterator[Link]:
        """A link for one operation, bounded by `deadline`.

        Without a deadline, opening a link has the connect timeout and the operation
        itself the operation timeout.

        Raises:
            StoreError: reason busy or closed, or what opening a link met.
        """
        patience = self._operation_timeout_s if deadline is None else deadline - time.monotonic()
        if not self._places.acquire(timeout=max(0.0, patience)):
            raise StoreError("busy", "all connections are in use", down=False)
        try:
            link = self._take(_until(deadline, self._connect_timeout_s))
            link.expire_at(_until(deadline, self._operation_timeout_s))
            try:
                yield link
            finally:
                self._give_back(link)
        finally:
            self._places.release()

    def drop_idle(self) -> None:
        """Forget idle links: after an outage each of them would have to time out first."""
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        for link in busy:
            link.abort()
        self.drop_idle()

    def _take(self, deadline: float) -> Link:
        while (link := self._pop()) is not None:
            if not link.stale():
                return link
            self._discard(link)
        link = self._endpoint.dial(deadline)
        with self._lock:
            if not self._closed:
                self._busy.add(link)
                return link
        link.close()
        raise StoreError("closed", "the tier is closed", down=False)

    def _pop(self) -> Link | None:
        with self._lock:
            if self._closed:
                raise StoreError("closed", "the tier is closed", down=False)
            if not self._idle:
                return None
            link = self._idle.pop()
            self._busy.add(link)
            return link

    def _give_back(self, link: Link) -> None:
        if not link.in_step:
            self._discard(link)
            return
        with self._lock:
            self._busy.discard(link)
            if not self._closed:
                self._idle.append(link)
                return
        link.close()

    def _discard(self, link: Link) -> None:
        with self._lock:
            self._busy.discard(link)
        link.close()


class AskingPool(LinkPool):
    """Links to a cluster node that takes over a slot; each is good for one command."""

    @contextmanager
    def link(self, deadline: float | None = None) -> Iterator[Link]:
        with super().link(deadline) as link:
            link.send([pack("ASKING")])
            link.reply()
            yield link
