"""Connections that redis-py opens and a `Link` uses: the one file that knows its inside.

redis-py keeps what it is good at: the URL, TCP, TLS or unix socket, and the login.  Used
from its inside are `_connect` of its connection classes, which returns the socket that
the connection then talks through, and the attributes `host`, `port` and
`socket_connect_timeout` that it reads.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any

from redis.connection import Connection, SSLConnection, UnixDomainSocketConnection

from elora_connector.tiers.redis_failure import StoreError
from elora_connector.tiers.redis_link import Link


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
