"""One connection to Redis, with one absolute deadline over everything it does.

redis-py opens the connection (URL, TCP, TLS or unix socket, login).  From then on the
few replies needed are read here, for two reasons: a payload moves straight between
socket and slot, and a deadline bounds the whole operation, where a socket timeout
bounds only each `recv` and a server that trickles bytes could hold a thread for ever.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence
from typing import Any, Final

from elora_connector.tiers.redis_failure import (
    TLS_ALERT,
    LinkClosedError,
    ReplyError,
    not_redis,
)
from elora_connector.tiers.redis_socket import wire_for

_SCRATCH_BYTES: Final = 16 * 1024

Reply = int | str | None


def pack(*args: str | bytes | int) -> bytes:
    """One command in RESP."""
    parts = [b"*%d\r\n" % len(args)]
    for arg in args:
        data = arg if isinstance(arg, bytes) else str(arg).encode("utf-8", "surrogatepass")
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def pack_set_options(ttl_s: int | None) -> bytes:
    """What follows the value in `pack_set`: only if the key is not there, and the TTL."""
    options: list[str | int] = ["NX"] if ttl_s is None else ["NX", "EX", ttl_s]
    return b"\r\n" + pack(*options).split(b"\r\n", 1)[1]


def pack_set(
    key: str, header: bytes, payload: memoryview, options: bytes
) -> list[bytes | memoryview]:
    """SET as pieces to send in turn, so that the payload is never copied."""
    name = key.encode("utf-8", "surrogatepass")
    size = len(header) + payload.nbytes
    head = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
        3 + options.count(b"$"),
        len(name),
        name,
        size,
        header,
    )
    return [head, payload, options]


class Link:
    """A connected socket, used by one thread at a time; `abort` alone may come from another.

    Every wait ends at the deadline with `TimeoutError`.  `in_step` is False from the
    moment a command is sent until its reply was read in full: such a link must be closed,
    since the next reply on it would belong to somebody else.
    """

    def __init__(self, sock: Any, deadline: float) -> None:
        self._sock = sock
        self._wire = wire_for(sock, deadline)
        self._buffer = bytearray(_SCRATCH_BYTES)
        self._scratch = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._owed = 0
        self.torn = False
        """In the middle of a bulk reply."""
        self.opened_by: Any = None
        """redis-py closes the socket of a connection object that is collected."""

    @property
    def in_step(self) -> bool:
        return self._owed == 0 and self._start == self._end

    def expire_at(self, deadline: float) -> None:
        """Bound everything from here on; `deadline` is in `time.monotonic` seconds."""
        self._wire.deadline = deadline

    def stale(self) -> bool:
        """Whether an idle link was closed by the server, or has bytes nobody asked for."""
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        self.opened_by = None
        self._sock.close()

    def abort(self) -> None:
        """Wake the thread that waits on this link; it will see a closed connection."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    # What redis-py calls while it opens the connection.

    def recv(self, size: int, *_: int) -> bytes:
        taken = bytearray(size)
        return bytes(taken[: self._wire.receive(memoryview(taken))])

    def recv_into(self, buffer: Any, *_: int) -> int:
        return self._wire.receive(memoryview(buffer).cast("B"))

    def sendall(self, data: Any) -> None:
        self._wire.send([data])

    def settimeout(self, _: float | None) -> None:
        """The deadline counts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    # What the tier calls afterwards.

    def send(self, pieces: Sequence[Any], replies: int = 1) -> None:
        """Send packed commands that will be answered by `replies` replies."""
        self._owed += replies
        self._wire.send(pieces)

    def reply(self) -> Reply:
        """One short reply: a number, a status word or nil.

        Raises:
            ReplyError: the server answered with an error.
        """
        got = self._reply()
        if isinstance(got, ReplyError):
            raise got
        return got

    def replies(self, count: int) -> list[Reply]:
        """`count` replies; all are read before the first error is raised."""
        got = [self._reply() for _ in range(count)]
        for reply in got:
            if isinstance(reply, ReplyError):
                raise reply
        return [reply for reply in got if not isinstance(reply, ReplyError)]

    def ask_value(self, key: str, limit: int) -> None:
        """Send GET; `bulk_size` says how large the value is, which may be above `limit`.

        Nothing is allocated for it here.
        """
        self.send([pack("GET", key)])

    def bulk_size(self) -> int | None:
        """Begin a bulk reply; the caller reads that many bytes and calls `end_bulk`.

        None stands for a missing key, after which nothing is left to read.
        """
        line = self._line()
        if line[:1] == b"$" and line != b"$-1":
            size = _number(line[1:])
            self.torn = True
            return size
        if line != b"$-1" and line[:1] != b"-":
            raise not_redis(line)
        self._owed -= 1
        if line[:1] == b"-":
            raise ReplyError(line[1:].decode("utf-8", "replace"))
        return None

    def take(self, size: int) -> bytes:
        """The next `size` bytes, where those are few."""
        taken = b""
        while len(taken) < size:
            if self._start == self._end:
                self._refill()
            step = min(size - len(taken), self._end - self._start)
            taken += self._scratch[self._start : self._start + step]
            self._start += step
        return taken

    def skip(self, size: int) -> None:
        """Receive `size` bytes and forget them."""
        while size > 0:
            if self._start == self._end:
                self._refill()
            step = min(size, self._end - self._start)
            self._start += step
            size -= step

    def fill(self, dest: memoryview) -> None:
        """Receive exactly `dest.nbytes` bytes into `dest`."""
        buffered = min(dest.nbytes, self._end - self._start)
        dest[:buffered] = self._scratch[self._start : self._start + buffered]
        self._start += buffered
        if self._wire.receive_all(dest[buffered:]) < dest.nbytes - buffered:
            raise LinkClosedError

    def end_bulk(self) -> None:
        """The end of a bulk reply, all of which was read."""
        tail = self.take(2)
        if tail != b"\r\n":
            raise not_redis(tail)
        self.torn = False
        self._owed -= 1

    def _reply(self) -> Reply | ReplyError:
        line = self._line()
        kind, rest = line[:1], line[1:]
        if line == b"$-1":
            reply: Reply | ReplyError = None
        elif kind == b"-":
            reply = ReplyError(rest.decode("utf-8", "replace"))
        elif kind == b":":
            reply = _number(rest)
        elif kind == b"+":
            reply = rest.decode("utf-8", "replace")
        else:
            raise not_redis(line)
        self._owed -= 1
        return reply

    def _line(self) -> bytes:
        line = b""
        while True:
            end = self._buffer.find(b"\n", self._start, self._end)
            stop = self._end if end < 0 else end + 1
            line += self._scratch[self._start : stop]
            self._start = stop
            if end >= 0:
                return line.rstrip(b"\r\n")
            if len(line) > _SCRATCH_BYTES or line[:1] == bytes([TLS_ALERT]):
                raise not_redis(line)
            self._refill()

    def _refill(self) -> None:
        self._start, self._end = 0, self._wire.receive(self._scratch)
        if not self._end:
            raise LinkClosedError


def _number(text: bytes) -> int:
    """A count or a size; none of the replies read here is ever negative."""
    if not text.isdigit() or len(text) > 18:
        raise not_redis(text)
    return int(text)
