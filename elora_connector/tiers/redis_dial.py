"""Connections that redis-py opens and a `Link` uses: the one file that knows its inside.

redis-py keeps what it is good at: the URL, TCP, TLS or unix socket, and the login.  Used
from its inside are `_connect` of its connection classes, which returns the socket that
the connection then talks through, and the attributes `host`, `port` and
`socket_connect_timeout` that it reads.  Once per process a connection to ourselves shows
whether that still holds; if not, links use redis-py's public methods only.
"""

from __future__ import annotations

import functools
import logging
import socket
import ssl
import time
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.retry import Retry

from elora_connector.tiers.redis_failure import StoreError
from elora_connector.tiers.redis_link import Link, pack
from elora_connector.tiers.redis_plain import PlainLink

logger = logging.getLogger(__name__)


def kind_of(plain: type) -> type:
    """The class to open a connection with, in place of redis-py's own `plain`."""
    return _LINKED[plain] if inside_is_known() else plain


def link_of(connection: Any) -> Link:
    """The link over a connection that was just opened; it owns the connection."""
    if not isinstance(connection, _Linked):
        return PlainLink(connection)
    link = connection.link
    link.opened_by = connection
    return link


def anonymous() -> dict[str, Any]:
    """Do without CLIENT SETINFO: two round trips that tell the server nothing useful."""
    if hasattr(redis, "DriverInfo"):
        return {"driver_info": None}
    return {"lib_name": None, "lib_version": None}


@functools.cache
def inside_is_known() -> bool:
    """Whether this redis-py opens connections in the way that is relied on here."""
    try:
        _test_inside()
    except Exception as error:  # noqa: BLE001 - whatever a future redis-py does, we still work
        logger.warning(
            "redis-py %s works in another way than expected (%s: %s); the remote tier uses "
            "its public methods and is slower",
            redis.__version__,
            type(error).__name__,
            error,
        )
        return False
    return True


def _test_inside() -> None:
    """Log in to ourselves, then read a value: all bytes must pass through the link."""
    ours, other = socket.socketpair()
    with ours, other:
        other.settimeout(1.0)
        other.sendall(b"+OK\r\n")
        connection: Any = _Handed(  # type: ignore[no-untyped-call]
            password="self-test",  # noqa: S106 - it stays in this process
            socket_timeout=1.0,
            socket_connect_timeout=1.0,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            **anonymous(),
        )
        connection.sock = ours
        connection.connect()
        other.sendall(b"$5\r\nhello\r\n")
        link = link_of(connection)
        link.ask_value("key", 5)
        found = link.bulk_size(), link.take(5)
        link.end_bulk()
        wanted = pack("AUTH", "self-test") + pack("GET", "key")
        if found != (5, b"hello") or not link.in_step or other.recv(4096) != wanted:
            raise StoreError("internal", "bytes went another way", down=False)
        connection.disconnect()


class _Dialled(Connection):
    """A TCP connection whose timeout covers all addresses of the host together."""

    reached = False

    def _connect(self) -> Any:
        self.reached = False
        deadline = time.monotonic() + float(self.socket_connect_timeout or 0)
        failed: OSError = OSError("the host name has no address")
        for family, kind, proto, _, address in socket.getaddrinfo(
            self.host, self.port, 0, socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, proto)
            try:
                sock.settimeout(max(0.001, deadline - time.monotonic()))
                sock.connect(address)
            except OSError as error:
                sock.close()
                failed = error
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            self.reached = True
            return sock
        raise failed


class _Linked:
    """Mix-in: redis-py talks through a `Link`, which stays ours when it has finished."""

    link: Link

    def _connect(self) -> Link:
        timeout_s: float = self.socket_connect_timeout  # type: ignore[attr-defined]
        deadline = time.monotonic() + timeout_s
        self.link = Link(super()._connect(), deadline)  # type: ignore[misc]
        return self.link


class PlainConnection(_Linked, _Dialled):
    """redis://"""


class _Given(Connection):
    """Over a socket that is already there."""

    sock: socket.socket

    def _connect(self) -> Any:
        return self.sock


class _Handed(_Linked, _Given):
    """For the test of ourselves."""


class UnixConnection(_Linked, UnixDomainSocketConnection):
    """unix://"""


class _Tls(SSLConnection, _Dialled):
    def _connect(self) -> Any:
        try:
            return super()._connect()  # type: ignore[no-untyped-call]
        except OSError as error:
            if not self.reached:
                raise
            raise StoreError("tls", _tls_cause(error), down=True) from None


class TlsConnection(_Linked, _Tls):
    """rediss://"""


_LINKED: dict[type, type] = {
    Connection: PlainConnection,
    SSLConnection: TlsConnection,
    UnixDomainSocketConnection: UnixConnection,
}


def _tls_cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"the server's certificate is not accepted ({error.verify_message}); "
            "name the CA file that signed it"
        )
    if isinstance(error, FileNotFoundError):
        return "a certificate file cannot be read"
    if isinstance(error, ssl.SSLError) and error.reason not in {"WRONG_VERSION_NUMBER", None}:
        return f"the TLS handshake failed ({error.reason})"
    return (
        "the TLS handshake did not complete; the server seems not to speak TLS on this port "
        "(rediss:// is TLS, redis:// is not)"
    )
