"""What can go wrong with a Redis, in stable words, and never with a secret in it."""

from __future__ import annotations

import re
import ssl
from typing import Final

import redis.exceptions as redis_errors

from elora_connector.errors import EloraError

TLS_ALERT: Final = 0x15
"""First byte of a TLS alert, which a plain client receives from a port that expects TLS."""


class StoreError(EloraError):
    """An operation on the store failed.

    `reason` is a word for metrics: timeout, connection, tls, auth, readonly, loading,
    oom, reply, moved, ask, cluster, busy, closed, breaker or internal.  `down` says that
    the store as a whole is unusable, so the breaker opens.  `instead` is the ``host:port``
    that a cluster node named with moved or ask.
    """

    def __init__(self, reason: str, message: str, *, down: bool, instead: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.down = down
        self.instead = instead


class LinkClosedError(StoreError):
    """The server ended the connection; before its first answer that hints at TLS."""

    def __init__(self, message: str = "the server closed the connection") -> None:
        super().__init__("connection", message, down=True)


class ReplyError(Exception):
    """An error reply, in the server's own words; the connection stays usable."""


_REPLIES: Final[dict[str, tuple[str, bool]]] = {
    "LOADING": ("loading", True),
    "MASTERDOWN": ("loading", True),
    "NOAUTH": ("auth", True),
    "WRONGPASS": ("auth", True),
    "NOPERM": ("auth", False),
    "READONLY": ("readonly", False),
    "OOM": ("oom", False),
    "CLUSTERDOWN": ("cluster", True),
    "TRYAGAIN": ("cluster", False),
    "CROSSSLOT": ("cluster", False),
}
"""First word of an error reply -> reason, and whether the whole store is unusable."""

_ERROR_WORD: Final = re.compile(r"[A-Z]{1,32}")
_HINTS: Final[dict[str, str]] = {
    "LOADING": "the server is still loading its data",
    "NOAUTH": "the server requires a login and none is configured",
    "WRONGPASS": "wrong user or password, or the user is disabled",
    "NOPERM": "the ACL of this user does not allow the command or the key",
    "READONLY": "this is a read-only replica; use the primary's address",
    "OOM": "the server is full and evicts nothing; set maxmemory-policy allkeys-lru",
    "MOVED": "this is a node of a Redis Cluster; use a redis-cluster:// URL",
    "ASK": "this is a node of a Redis Cluster; use a redis-cluster:// URL",
    "SINGLE": "this server is no node of a Redis Cluster; use a redis:// URL",
    "CLUSTERDOWN": "the Redis Cluster does not serve all of its slots",
    "TRYAGAIN": "the Redis Cluster is moving the keys of this slot",
}

_PLACE: Final = re.compile(r"[^ ]{0,300}:\d{1,5}$")
"""The address at the end of MOVED and ASK."""

_LOGIN: Final[tuple[tuple[type[Exception], str, str], ...]] = (
    (redis_errors.BusyLoadingError, "loading", _HINTS["LOADING"]),
    (redis_errors.AuthenticationError, "auth", _HINTS["WRONGPASS"]),
    (redis_errors.NoPermissionError, "auth", _HINTS["NOPERM"]),
    (redis_errors.ResponseError, "reply", "the server refused the login sequence"),
)
"""What redis-py may raise while it logs in; the first class that fits counts."""


def explain(error: Exception) -> StoreError:
    """Say what any exception of an operation means."""
    if isinstance(error, StoreError):
        return error
    if isinstance(error, ReplyError):
        return _explain_reply(str(error))
    if isinstance(error, redis_errors.RedisError):
        return _explain_login(error)
    return _explain_system(error)


def not_redis(line: bytes) -> StoreError:
    """The bytes received are no reply of a Redis."""
    if line[:1] == bytes([TLS_ALERT]):
        return StoreError("tls", "the server answered in TLS; use rediss://", down=True)
    return StoreError("reply", "the server does not answer like Redis", down=True)


def _explain_reply(text: str) -> StoreError:
    word = text.split(" ", 1)[0]
    if text.startswith("ERR max number of clients"):
        return StoreError("connection", "the server has no client slot left", down=True)
    if word in {"MOVED", "ASK"}:
        there = _PLACE.search(text)
        instead = there[0] if there else ""
        return StoreError(word.lower(), _HINTS[word], down=False, instead=instead)
    if text.startswith("ERR This instance has cluster support disabled"):
        return StoreError("cluster", _HINTS["SINGLE"], down=True)
    reason, down = _REPLIES.get(word, ("reply", False))
    # Not the server's full text: some errors echo arguments, among them a password.
    known = word if _ERROR_WORD.fullmatch(word) else "of an unknown kind"
    return StoreError(reason, _HINTS.get(word, f"error reply {known}"), down=down)


def _explain_login(error: redis_errors.RedisError) -> StoreError:
    text = str(error)
    if isinstance(error, redis_errors.TimeoutError):
        return _explain_system(TimeoutError())
    if "without any password configured" in text:
        return StoreError(
            "auth", "a password is configured here, but the server has none set", down=True
        )
    if isinstance(error, redis_errors.InvalidResponse):
        return not_redis(bytes([TLS_ALERT]) if "x15" in text else b"")
    for kind, reason, message in _LOGIN:
        if isinstance(error, kind):
            return StoreError(reason, message, down=True)
    cause = error.__context__
    return _explain_system(cause) if isinstance(cause, OSError) else LinkClosedError()


def _explain_system(error: Exception) -> StoreError:
    if isinstance(error, TimeoutError):
        return StoreError("timeout", "no answer within the timeout", down=True)
    if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or ""):
        text = f"the server's TLS turned us away ({error.reason}); it may ask for a certificate"
        return StoreError("tls", text, down=True)
    if isinstance(error, ConnectionResetError | BrokenPipeError):
        return LinkClosedError()
    if isinstance(error, OSError):
        return StoreError("connection", error.strerror or type(error).__name__, down=True)
    return StoreError("internal", f"unexpected {type(error).__name__}", down=False)
