"""A link that uses nothing but the public methods of a redis-py connection.

The fall-back for a redis-py whose inside is not as `redis_dial` knows it.  It does all
that a `Link` does, but each value is copied once more, and a wait is bounded per receive
(by the timeout that the connection was opened with) instead of as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from redis import exceptions as redis_errors
from redis.exceptions import RedisError, ResponseError

from elora_connector.tiers.redis_failure import ReplyError, not_redis
from elora_connector.tiers.redis_link import Link, Reply, pack

_WORDS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (redis_errors.BusyLoadingError, "LOADING"),
    (redis_errors.ReadOnlyError, "READONLY"),
    (redis_errors.NoPermissionError, "NOPERM"),
    (redis_errors.AuthenticationError, "NOAUTH"),
    (redis_errors.OutOfMemoryError, "OOM"),
    (redis_errors.MovedError, "MOVED"),
    (redis_errors.AskError, "ASK"),
    (redis_errors.TryAgainError, "TRYAGAIN"),
    (redis_errors.MasterDownError, "MASTERDOWN"),
    (redis_errors.ClusterDownError, "CLUSTERDOWN"),
    (redis_errors.ClusterCrossSlotError, "CROSSSLOT"),
)
"""First words of error replies, which redis-py turns into classes; first fit counts."""


class PlainLink(Link):
    """A `Link` over a connected redis-py connection; not built by `Link.__init__`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._owed = 0
        self._value = memoryview(b"")
        self.torn = False
        self.opened_by = connection

    @property
    def in_step(self) -> bool:
        return self._owed == 0 and not self.torn

    def expire_at(self, deadline: float) -> None:
        """The connection has its own timeout."""

    def stale(self) -> bool:
        try:
            return bool(self._connection.can_read(0))
        except (RedisError, OSError):
            return True

    def close(self) -> None:
        self._connection.disconnect()

    def abort(self) -> None:
        self._connection.disconnect()

    def send(self, pieces: Sequence[Any], replies: int = 1) -> None:
        self._owed += replies
        self._connection.send_packed_command(list(pieces), check_health=False)

    def ask_value(self, key: str, limit: int) -> None:
        # redis-py allocates whatever the server sends, so the server is asked for no more.
        # GETRANGE goes first: behind ASKING, only one command is carried out.
        self.send([pack("GETRANGE", key, 0, limit), pack("EXISTS", key)])

    def bulk_size(self) -> int | None:
        value, exists = self._read(), self._read()
        self._owed -= 1
        if isinstance(value, ReplyError):
            raise value
        if not isinstance(value, bytes) or not isinstance(exists, (int, ReplyError)):
            raise not_redis(b"")
        if not value and (not exists or isinstance(exists, ReplyError)):
            return None
        self._owed += 1
        self._value, self.torn = memoryview(value), True
        return len(value)

    def take(self, size: int) -> bytes:
        taken, self._value = self._value[:size], self._value[size:]
        return bytes(taken)

    def skip(self, size: int) -> None:
        self._value = self._value[size:]

    def fill(self, dest: memoryview) -> None:
        dest[:] = self._value[: dest.nbytes]
        self._value = self._value[dest.nbytes :]

    def end_bulk(self) -> None:
        self.torn = False
        self._owed -= 1

    def _reply(self) -> Reply | ReplyError:
        reply = self._read()
        self._owed -= 1
        if isinstance(reply, bytes):
            return reply.decode("utf-8", "replace")
        if reply is None or isinstance(reply, (int, str, ReplyError)):
            return reply
        raise not_redis(b"")

    def _read(self) -> Any:
        try:
            return self._connection.read_response(disable_decoding=True)
        except ResponseError as error:
            word = next((word for kind, word in _WORDS if isinstance(error, kind)), "")
            return ReplyError(f"{word} {error}".strip())
